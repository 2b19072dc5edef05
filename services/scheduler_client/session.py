"""The gateway's end of one session with a scheduler, from the opening of the stream to its break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import grpc
import grpc.aio

from spool.protos import cell_view_pb2, cell_view_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from spool.services.backend.interface import BackendUnavailableError
from spool.services.rpc.errors import rpc_reason
from spool.services.rpc.protocol_version import SOFTWARE_VERSION, SPOKEN, version_conflict
from spool.services.rpc.replies import readable
from spool.services.rpc.supervision import is_cancelled
from spool.services.scheduler_client.remote_stream import RemoteStream

# Tokens of the submissions in one message; a message can hold several times as many.
_TOKENS_PER_REQUEST = 500_000

_FIRST_INTERVAL_SECONDS = 1.0

_VIEW_TIMEOUT_SECONDS = 10.0

# Probes ask for it, and give up after a few seconds themselves.
_STATUS_SECONDS = 1.5


class SessionBrokenError(BackendUnavailableError):
    """The session has ended; the message says why."""


class SchedulerReplacedError(SessionBrokenError):
    """Another scheduler has taken over; the session's sequences are not to blame."""


class VersionConflictError(SessionBrokenError):
    """The scheduler speaks another version of the protocol."""


_BROKEN_BY = {
    grpc.StatusCode.ABORTED: SchedulerReplacedError,
    grpc.StatusCode.FAILED_PRECONDITION: VersionConflictError,
}


class ClientSession:
    """Sends submissions and cancellations, as many in one message as wait, and empty messages that keep the lease."""

    def __init__(self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...], gateway_id: str) -> None:
        self._stub = scheduler_pb2_grpc.SchedulerStub(channel)
        self._viewer = cell_view_pb2_grpc.CellViewerStub(channel)
        self._metadata = metadata
        self._gateway_id = gateway_id
        self._interval = _FIRST_INTERVAL_SECONDS
        self._submissions: dict[int, RemoteStream] = {}
        self._cancellations: set[int] = set()
        self._more = asyncio.Event()

    def submit(self, stream: RemoteStream) -> None:
        self._submissions[stream.request_id] = stream
        self._more.set()

    def cancel(self, request_id: int) -> None:
        if self._submissions.pop(request_id, None) is None:
            self._cancellations.add(request_id)
            self._more.set()

    async def status(self, timeout_seconds: float) -> scheduler_pb2.StatusReply:
        """Raises BackendUnavailableError, also where the scheduler is closed. Waits for `_STATUS_SECONDS` at most."""
        limit = min(timeout_seconds, _STATUS_SECONDS)
        try:
            status: scheduler_pb2.StatusReply = readable(
                await self._stub.Status(scheduler_pb2.StatusRequest(), timeout=limit, metadata=self._metadata)
            )
        except grpc.aio.AioRpcError as error:
            raise SessionBrokenError(f"the scheduler does not answer: {rpc_reason(error)}") from error
        if status.state != scheduler_pb2.SCHEDULER_STATE_SERVING:
            raise BackendUnavailableError(f"the scheduler is closed: {status.reason}")
        return status

    async def watch(self, period_seconds: float, max_sequences: int) -> AsyncGenerator[cell_view_pb2.CellView, None]:
        """One view each period, until the reader stops. Raises SessionBrokenError, also if none comes for a while."""
        request = cell_view_pb2.WatchRequest(period_seconds=period_seconds, max_sequences=max_sequences)
        call = self._viewer.Watch(request, metadata=self._metadata)
        views = aiter(call)
        try:
            while True:
                async with asyncio.timeout(period_seconds + _VIEW_TIMEOUT_SECONDS):
                    view = readable(await anext(views))
                yield view
        except TimeoutError:
            raise SessionBrokenError(f"no view came for {_VIEW_TIMEOUT_SECONDS:g} s") from None
        except StopAsyncIteration:
            raise SessionBrokenError("the scheduler shows no more") from None
        except asyncio.CancelledError:
            # gRPC raises this error also where the session has ended and closed the channel under the call.
            if is_cancelled():
                raise
            raise SessionBrokenError("the session is over") from None
        except grpc.aio.AioRpcError as error:
            raise SessionBrokenError(rpc_reason(error)) from error
        finally:
            call.cancel()

    async def run(
        self,
        open_timeout_seconds: float,
        on_open: Callable[[], None],
        on_event: Callable[[scheduler_pb2.SequenceEvent], None],
        on_load: Callable[[scheduler_pb2.CellLoad], None],
    ) -> None:
        """Reads until the session breaks, which raises SessionBrokenError with the reason."""
        clock = asyncio.get_running_loop().time
        silence = open_timeout_seconds
        call = self._stub.Session(self._requests(), metadata=self._metadata)
        try:
            async with asyncio.timeout(silence) as deadline:
                async for reply in call:
                    # Before the load: a cell without targets has first to say whom it suspects.
                    for event in readable(reply).events:
                        on_event(event)
                    if reply.HasField("load"):
                        on_load(reply.load)
                    if reply.HasField("opened"):
                        _check_version(reply.opened)
                        silence = reply.opened.lease_seconds
                        self._interval = silence / 3
                        self._more.set()
                        on_open()
                    deadline.reschedule(clock() + silence)
            raise SessionBrokenError("the scheduler ended the session")
        except TimeoutError:
            raise SessionBrokenError(f"nothing came from the scheduler for {silence:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise _BROKEN_BY.get(error.code(), SessionBrokenError)(rpc_reason(error)) from error
        except asyncio.InvalidStateError as error:
            raise SessionBrokenError(f"the stream broke: {error}") from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise SessionBrokenError("the stream was cancelled: a request cannot be sent") from None
        except ValueError as error:
            raise SessionBrokenError(f"the scheduler's reply cannot be understood: {error}") from error
        finally:
            call.cancel()

    async def _requests(self) -> AsyncIterator[scheduler_pb2.SessionRequest]:
        opening = scheduler_pb2.SessionOpening(
            gateway_id=self._gateway_id,
            protocol_version=SPOKEN.newest,
            oldest_protocol_version=SPOKEN.oldest,
            version=SOFTWARE_VERSION,
        )
        yield scheduler_pb2.SessionRequest(opening=opening)
        while True:
            try:
                async with asyncio.timeout(self._interval):
                    await self._more.wait()
            except TimeoutError:
                # An empty message keeps the lease.
                yield scheduler_pb2.SessionRequest()
            else:
                yield self._next_request()

    def _next_request(self) -> scheduler_pb2.SessionRequest:
        request = scheduler_pb2.SessionRequest()
        tokens = 0
        while self._submissions and tokens < _TOKENS_PER_REQUEST:
            # Not before it leaves: of a request with many long choices, each takes milliseconds.
            submission = self._submissions.pop(next(iter(self._submissions))).submission()
            tokens += len(submission.prompt) + len(submission.committed_output)
            request.submissions.append(submission)
        request.cancelled_request_ids.extend(sorted(self._cancellations))
        self._cancellations.clear()
        if not self._submissions:
            self._more.clear()
        return request


def _check_version(opened: scheduler_pb2.SessionOpened) -> None:
    conflict = version_conflict("the scheduler", opened, "this gateway", SPOKEN)
    if conflict is not None:
        raise VersionConflictError(conflict)
