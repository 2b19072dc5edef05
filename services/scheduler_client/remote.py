"""The backend over the schedulers of one or several cells, in other processes that come and go."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from spool.protos import cell_view_pb2, scheduler_pb2
from spool.scheduler.messages import FinishReason, RefusalCause
from spool.services.backend.interface import BackendUnavailableError, GenerationRequest
from spool.services.backend.sequence_stream import AdmissionRefusedError, SequenceFailedError
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.scheduler_client.cell_choice import CellChoice
from spool.services.scheduler_client.cell_link import CellLink, ClientOptions, Resolve
from spool.services.scheduler_client.remote_stream import RemoteStream

logger = logging.getLogger(__name__)


class RecoveryListener(Protocol):
    """Hears of sessions that open and break. Calls come from the event loop and must not block."""

    def session_opened(self) -> None: ...

    def session_broke(self) -> None: ...

    def resubmitted(self, sequences: int) -> None:
        """So many sequences go on in another session."""


class SchedulerClient:
    """The gateway's way to the schedulers, one of each cell, over a session with each.

    `cells` names them: each gives the address of its cell's scheduler. A sequence stays in the cell that was chosen for
    it (`cell_choice`). When that session breaks, or the cell has no target any more while another has one, the sequence
    is submitted to another cell, or to the next scheduler of its own, with the tokens received so far. Its reader sees
    a pause only: the output depends on the request alone, so it goes on exactly where it stopped. Use `async with`, or
    `start` and `close`; all methods belong to one event loop.
    """

    def __init__(
        self,
        cells: Sequence[Resolve],
        *,
        security: ChannelSecurity | None = None,
        options: ClientOptions | None = None,
        gateway_id: str = "",
        listener: RecoveryListener | None = None,
    ) -> None:
        self._options = options or ClientOptions()
        self._listener = listener
        self._links = [
            CellLink(
                number,
                resolve,
                self,
                security=security or ChannelSecurity(),
                options=self._options,
                gateway_id=gateway_id,
            )
            for number, resolve in enumerate(cells, 1)
        ]
        self._choice = CellChoice()
        self._ids = itertools.count(1)
        self._unplaced: dict[RemoteStream, None] = {}
        self._running = False
        self._broken: Exception | None = None
        self._gave_up = False
        self._patience: asyncio.TimerHandle | None = None
        self._model: scheduler_pb2.ServedModel | None = None
        self._model_time = float("-inf")

    def start(self) -> None:
        """Starts to look for schedulers."""
        self._running = True
        self._lose_patience_later()
        for link in self._links:
            link.start()

    async def close(self) -> None:
        """Ends the sessions. Unfinished sequences fail."""
        self._running = False
        if self._patience is not None:
            self._patience.cancel()
        self._fail_all("the gateway is shutting down")
        for link in self._links:
            await link.close()

    def check_health(self) -> None:
        """Raises RuntimeError once nothing looks for the scheduler of a cell any more."""
        for link in self._links:
            link.check_health()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def cells(self) -> int:
        return len(self._links)

    @property
    def connected(self) -> bool:
        """Whether there is a session with the scheduler of any cell."""
        return any(link.connected for link in self._links)

    @property
    def streams(self) -> list[RemoteStream]:
        """The unfinished ones."""
        return [*self._unplaced, *(stream for link in self._links for stream in link.streams.values())]

    def submit(self, request: GenerationRequest) -> RemoteStream:
        """Submits a sequence; to await the stream is to wait until the sequence is admitted. Raises
        BackendUnavailableError."""
        if not self._running:
            raise BackendUnavailableError("the connection to the scheduler is closed")
        if self._broken is not None:
            raise BackendUnavailableError(_broken(self._broken))
        if self._gave_up:
            raise BackendUnavailableError(self._given_up())
        stream = RemoteStream(next(self._ids), request, self._stream_ended)
        self._place(stream)
        return stream

    async def model(self) -> scheduler_pb2.ServedModel:
        """What the targets serve; may wait for the first target worker.

        Raises BackendUnavailableError where no target is up and none was up before.
        """
        clock = asyncio.get_running_loop().time
        if self._model is not None and clock() - self._model_time < self._options.model_age:
            return self._model
        end = clock() + self._options.first_model_timeout
        while True:
            try:
                self._learn_model(await self.statuses(), clock())
                trouble = BackendUnavailableError("no target worker is up")
            except BackendUnavailableError as error:
                trouble = error
            if self._model is not None:
                return self._model
            # A gateway that replaces another has clients at once, and finds its scheduler a little later.
            if self._gave_up or clock() >= end:
                raise trouble
            await asyncio.sleep(self._options.first_backoff)

    def _learn_model(self, statuses: list[scheduler_pb2.StatusReply], now: float) -> None:
        for status in statuses:
            if status.HasField("model"):
                self._model, self._model_time = status.model, now

    async def statuses(self) -> list[scheduler_pb2.StatusReply]:
        """Of the cells whose scheduler answers. Raises BackendUnavailableError where none does."""
        asked = await asyncio.gather(*(self._status(link) for link in self._links), return_exceptions=True)
        troubles = [error for error in asked if isinstance(error, BaseException)]
        for error in troubles:
            if not isinstance(error, BackendUnavailableError):
                raise error
        if len(troubles) == len(asked):
            raise troubles[0]
        return [status for status in asked if not isinstance(status, BaseException)]

    async def _status(self, link: CellLink) -> scheduler_pb2.StatusReply:
        return await link.session.status(self._options.connect_timeout)

    def watch(
        self, period_seconds: float, max_sequences: int, cell: int = 1
    ) -> AsyncGenerator[cell_view_pb2.CellView, None]:
        """One view of the cell (from 1 on) each period (0.1 to 60 s), until the generator is closed.

        Raises BackendUnavailableError.
        """
        return self._links[cell - 1].session.watch(period_seconds, max_sequences)

    # What the links tell.

    def opened(self, link: CellLink) -> None:
        self._gave_up = False
        if self._patience is not None:
            self._patience.cancel()
        if self._listener is not None:
            self._listener.session_opened()
        unplaced, self._unplaced = list(self._unplaced), {}
        self._place_again(unplaced)

    def broke(self, link: CellLink, streams: list[RemoteStream]) -> None:
        if self._listener is not None:
            self._listener.session_broke()
        self._choice.forget(link.number)
        if not self.connected:
            self._lose_patience_later()
        self._place_again(streams)

    def load_changed(self, link: CellLink) -> None:
        """Sequences of a cell without targets go to one that has some."""
        connected = [one for one in self._links if one.connected]
        if not any(one.state.targets for one in connected):
            return
        for helpless in (one for one in connected if not one.state.targets):
            streams = helpless.take_all_back()
            for stream in streams:
                self._left(stream)
            self._place_again(streams)

    def ended(self, link: CellLink, stream: RemoteStream, outcome: FinishReason | Exception) -> None:
        """Another cell may have the room that this one has not."""
        if _may_go_elsewhere(outcome):
            stream.refused_by.add(link.number)
            if any(other.connected and other.number not in stream.refused_by for other in self._links):
                self._left(stream)
                self._place(stream)
                return
        stream.end(outcome)

    def stopped(self, link: CellLink, error: Exception) -> None:
        logger.error("nothing looks for the scheduler of cell %d any more: %s", link.number, error, exc_info=error)
        self._broken = error
        self._fail_all(_broken(error))

    def _left(self, stream: RemoteStream) -> None:
        """The stream is no longer in a session that goes on, and may come back there."""
        stream.forgive_submission()
        stream.request_id = next(self._ids)

    def _place_again(self, streams: list[RemoteStream]) -> None:
        """Streams that were in a session before, or wait for the first one."""
        most = self._options.max_fruitless_submissions
        resubmitted = 0
        for stream in streams:
            stream.refused_by.clear()
            if self.connected and stream.fruitless_submissions >= most:
                message = f"{stream.fruitless_submissions} sessions broke without a token for the sequence"
                stream.end(SequenceFailedError(f"{message}; the last: {self._trouble}"))
                continue
            if self.connected and stream.submitted:
                resubmitted += 1
                logger.info("a sequence goes on in another session", extra={"request_id": stream.client_request_id})
            self._place(stream)
        if resubmitted and self._listener is not None:
            self._listener.resubmitted(resubmitted)

    def _place(self, stream: RemoteStream) -> None:
        """In one of the open sessions, or in the next one that opens."""
        links = {link.number: link for link in self._links if link.connected and link.number not in stream.refused_by}
        if links:
            cells = [link.state for link in links.values()]
            links[self._choice.choose(stream.request.cache_scope, stream.request.prompt, cells)].submit(stream)
        else:
            self._unplaced[stream] = None

    def _stream_ended(self, stream: RemoteStream) -> None:
        self._unplaced.pop(stream, None)
        if stream.cell is not None:
            self._links[stream.cell - 1].take_back(stream)

    def _lose_patience_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(self._options.give_up, self._give_up)

    def _give_up(self) -> None:
        self._gave_up = True
        self._fail_all(self._given_up())

    def _given_up(self) -> str:
        return f"no scheduler was reached for {self._options.give_up:g} s: {self._trouble}"

    @property
    def _trouble(self) -> str:
        return "; ".join(link.trouble for link in self._links)

    def _fail_all(self, reason: str) -> None:
        for stream in self.streams:
            stream.end(BackendUnavailableError(reason))


def workers_in_use(statuses: Iterable[scheduler_pb2.StatusReply]) -> list[scheduler_pb2.WorkerStatus]:
    in_use = scheduler_pb2.WORKER_STATE_IN_USE
    return [worker for status in statuses for worker in status.workers if worker.state == in_use]


def _broken(error: Exception) -> str:
    return f"the connection to the scheduler is broken: {error!r}"


def _may_go_elsewhere(outcome: FinishReason | Exception) -> bool:
    """Ends that say more of the cell than of the sequence."""
    if isinstance(outcome, AdmissionRefusedError):
        return outcome.cause in (RefusalCause.QUEUE_FULL, RefusalCause.KEY_LIMIT)
    return isinstance(outcome, BackendUnavailableError)
