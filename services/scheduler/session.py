"""The scheduler's end of one gateway's session. A sequence lives no longer than the stream of its session."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from protos import scheduler_pb2
from scheduler.messages import FinishReason, RefusalCause, Suspicion
from services.backend.interface import BackendUnavailableError, DeadlineExceededError
from services.backend.sequence_stream import AdmissionRefusedError, TokenDelta
from services.backend.session_codec import request_from_wire
from services.observability.request_ids import LONGEST_REQUEST_ID
from services.rpc.backoff import require_positive
from services.rpc.protocol_version import PROTOCOL_VERSION, version_conflict
from services.scheduler.outbox import SessionOutbox
from services.scheduler.service import SchedulerService, SchedulerStoppedError, ServiceClosedError

logger = logging.getLogger(__name__)

# For RetryAdvice: how many ends of sequences are remembered, and the limits of the time that a client is told to wait.
_REMEMBERED_ENDS = 64
_MIN_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 30.0

# How old a gateway's knowledge of the cell's load gets.
_LOAD_SECONDS = 0.5

# Clients come back when the queue is this part shorter, all at about the same time, and find room.
_PART_OF_QUEUE = 0.1


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """A gateway that sends nothing for `lease_seconds` loses its sequences.

    Without a target worker, new sequences are refused after `refuse_without_target_seconds`, and waiting ones fail
    after `fail_without_target_seconds`. The scheduler stops reading from a gateway while `max_pending_events` events
    wait for it, one for each sequence.
    """

    lease_seconds: float = 10.0
    refuse_without_target_seconds: float = 10.0
    fail_without_target_seconds: float = 120.0
    max_pending_events: int = 8192

    def __post_init__(self) -> None:
        require_positive(self, "lease_seconds", "refuse_without_target_seconds", "fail_without_target_seconds")
        if self.max_pending_events < 1:
            raise ValueError(f"max_pending_events is {self.max_pending_events}, must be at least 1")


class SessionEndedError(RuntimeError):
    """The session has ended; `code` is the status of its stream."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class RetryAdvice:
    """Says when a refused client should come again, from how fast sequences ended lately.

    Times are seconds on one monotonic clock, passed in.
    """

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_REMEMBERED_ENDS)

    def sequence_ended(self, now: float) -> None:
        self._ends.append(now)

    def seconds(self, waiting: int, now: float) -> float:
        """How long it takes until a good part of the `waiting` sequences has been worked off."""
        if not self._ends or now <= self._ends[0]:
            return _MIN_RETRY_SECONDS
        ends_per_second = len(self._ends) / (now - self._ends[0])
        return min(max(_PART_OF_QUEUE * waiting / ends_per_second, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)


class GatewaySession:
    """Runs one session. However the session ends, `run` cancels its sequences before it returns."""

    def __init__(self, service: SchedulerService, options: SessionOptions, advice: RetryAdvice) -> None:
        self.gateway_id = ""
        self._service = service
        self._options = options
        self._advice = advice
        self._outbox = SessionOutbox(options.max_pending_events)
        self._live: dict[int, _SessionSequence] = {}
        self._opened = asyncio.Event()
        self._closing: asyncio.Future[SessionEndedError] = asyncio.get_running_loop().create_future()

    async def run(
        self,
        requests: AsyncIterator[scheduler_pb2.SessionRequest],
        write: Callable[[scheduler_pb2.SessionReply], Awaitable[None]],
    ) -> None:
        """Returns when the gateway ends the session. Raises SessionEndedError, and what reading and writing raise."""
        reader = asyncio.create_task(self._read(requests))
        writer = asyncio.create_task(self._write(write))
        try:
            ends: set[asyncio.Future[Any]] = {reader, writer, self._closing}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._drop_all()
            # The task that ended by itself gives the reason; the other one is cancelled.
            ended = [task for task in (reader, writer) if task.done()]
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        if self._closing.done():
            raise self._closing.result()
        for task in ended:
            if task.cancelled():
                raise SessionEndedError(grpc.StatusCode.UNAVAILABLE, "the session was cancelled")
            task.result()

    def close(self, reason: str) -> None:
        """Ends the session; the gateway may submit its sequences elsewhere."""
        if not self._closing.done():
            code = grpc.StatusCode.ABORTED if self._service.fenced else grpc.StatusCode.UNAVAILABLE
            self._closing.set_result(SessionEndedError(code, reason))

    def tell_load(self) -> None:
        """The gateway has to know at once how the cell is."""
        self._outbox.wake()

    def fail_all(self, message: str) -> None:
        """Fails every sequence, because there is no target worker."""
        for sequence in list(self._live.values()):
            sequence.stop(BackendUnavailableError(message))

    async def _read(self, requests: AsyncIterator[scheduler_pb2.SessionRequest]) -> None:
        lease = self._options.lease_seconds
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(lease) as deadline:
                async for request in requests:
                    deadline.reschedule(clock() + lease)
                    self._take(request)
                    await self._outbox.room.wait()
        except TimeoutError:
            reason = f"nothing came from the gateway for {lease:g} s"
            self._service.metrics.lease_expired()
            logger.warning("session of gateway %s: %s", self.gateway_id, reason)
            raise SessionEndedError(grpc.StatusCode.UNAVAILABLE, reason) from None

    async def _write(self, write: Callable[[scheduler_pb2.SessionReply], Awaitable[None]]) -> None:
        await self._opened.wait()
        opened = scheduler_pb2.SessionOpened(
            lease_seconds=self._options.lease_seconds, protocol_version=PROTOCOL_VERSION
        )
        await write(self._reply(opened=opened))
        while True:
            try:
                async with asyncio.timeout(min(self._options.lease_seconds / 3, _LOAD_SECONDS)):
                    await self._outbox.wait()
            except TimeoutError:
                logger.debug("nothing to tell gateway %s", self.gateway_id)
            await write(self._reply(events=self._outbox.take()))

    def _reply(self, **content: Any) -> scheduler_pb2.SessionReply:
        core = self._service.core
        others = max(core.live - len(self._live), 0)
        load = scheduler_pb2.CellLoad(targets=core.targets, sequences_of_others=others)
        return scheduler_pb2.SessionReply(scheduler_epoch=self._service.epoch, load=load, **content)

    def _take(self, request: scheduler_pb2.SessionRequest) -> None:
        if request.HasField("opening") == self._opened.is_set():
            problem = "the session is open already" if self._opened.is_set() else "the first message has no opening"
            raise SessionEndedError(grpc.StatusCode.INVALID_ARGUMENT, problem)
        if not self._opened.is_set():
            self._open(request.opening)
        # Cancellations come first: they make room for the submissions of the same message.
        for request_id in request.cancelled_request_ids:
            sequence = self._live.get(request_id)
            if sequence is not None:
                sequence.stop(FinishReason.CANCELLED)
        for submission in request.submissions:
            self._submit(submission)

    def _open(self, opening: scheduler_pb2.SessionOpening) -> None:
        self.gateway_id = opening.gateway_id
        conflict = version_conflict("the gateway", opening.protocol_version, "this scheduler", PROTOCOL_VERSION)
        if conflict is not None:
            logger.error("session of gateway %s: %s", self.gateway_id, conflict)
            raise SessionEndedError(grpc.StatusCode.FAILED_PRECONDITION, conflict)
        self._opened.set()

    def _submit(self, submission: scheduler_pb2.SequenceSubmission) -> None:
        request_id = submission.request_id
        if request_id in self._live:
            message = f"request_id {request_id} is taken by a live sequence of the session"
            raise SessionEndedError(grpc.StatusCode.INVALID_ARGUMENT, message)
        sequence_id, named = self._service.new_sequence_id(), submission.client_request_id[:LONGEST_REQUEST_ID]
        sequence = _SessionSequence(self, request_id, sequence_id, named, submission.traceparent)
        self._live[request_id] = sequence
        try:
            request = request_from_wire(sequence.sequence_id, submission)
            timeout = submission.timeout_seconds if submission.HasField("timeout_seconds") else None
            if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
                raise ValueError(f"timeout_seconds is {timeout}, must be above 0")
            targetless = self._service.workers.targetless_seconds
            if targetless > self._options.refuse_without_target_seconds and not submission.admitted_before:
                self._service.metrics.refused_without_target()
                sequence.end(BackendUnavailableError(f"no target worker has been up for {targetless:.0f} s"))
                return
            self._service.enter(request, sequence)
        except ValueError as error:
            self._service.metrics.refused(RefusalCause.INVALID)
            sequence.end(AdmissionRefusedError(RefusalCause.INVALID, str(error)))
        except AdmissionRefusedError as error:
            sequence.end(error)
        except ServiceClosedError as error:
            self.close(str(error))
        else:
            sequence.entered(timeout)

    def _drop_all(self) -> None:
        for sequence in list(self._live.values()):
            sequence.stop(FinishReason.CANCELLED)

    # Called by the session's sequences.

    def sequence_entered(self, request_id: int) -> None:
        self._outbox.admitted(request_id)

    def sequence_pushed(self, request_id: int, delta: TokenDelta) -> None:
        self._outbox.push(request_id, delta)

    def sequence_suspected(self, request_id: int, suspicion: Suspicion) -> None:
        self._outbox.suspect(request_id, suspicion)

    def sequence_ended(self, request_id: int, outcome: FinishReason | Exception) -> None:
        del self._live[request_id]
        if isinstance(outcome, SchedulerStoppedError):
            # Ending the session as well lets the gateway submit the sequence elsewhere.
            self.close(str(outcome))
            return
        now = asyncio.get_running_loop().time()
        retry_after = 0.0
        if isinstance(outcome, AdmissionRefusedError):
            known = outcome.retry_after_seconds
            retry_after = self._advice.seconds(self._service.core.waiting, now) if known is None else known
        else:
            self._advice.sequence_ended(now)
        self._outbox.end(request_id, outcome, retry_after)

    def cancel_in_service(self, sequence_id: int) -> None:
        self._service.cancel(sequence_id)


class _SessionSequence:
    """Takes the output of one sequence for its session (services.scheduler.service.SequenceSink)."""

    def __init__(
        self, session: GatewaySession, request_id: int, sequence_id: int, client_request_id: str, traceparent: str
    ) -> None:
        self.sequence_id = sequence_id
        self.client_request_id = client_request_id
        self.traceparent = traceparent
        self._session = session
        self._request_id = request_id
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None

    def entered(self, timeout_seconds: float | None) -> None:
        """The service has admitted the sequence, unless the sequence has ended already."""
        if self._ended:
            return
        logger.debug("sequence %d entered", self.sequence_id, extra={"request_id": self.client_request_id})
        self._session.sequence_entered(self._request_id)
        if timeout_seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout_seconds, self._expire, timeout_seconds)

    def stop(self, outcome: FinishReason | Exception) -> None:
        """Ends the sequence with this outcome, here and in the service."""
        self.end(outcome)
        self._session.cancel_in_service(self.sequence_id)

    def push(self, delta: TokenDelta) -> None:
        if not self._ended:
            self._session.sequence_pushed(self._request_id, delta)

    def suspect(self, suspicion: Suspicion) -> None:
        if not self._ended:
            self._session.sequence_suspected(self._request_id, suspicion)

    def end(self, outcome: FinishReason | Exception) -> None:
        """The first end counts."""
        if self._ended:
            return
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._log_end(outcome)
        self._session.sequence_ended(self._request_id, outcome)

    def _log_end(self, outcome: FinishReason | Exception) -> None:
        named = {"request_id": self.client_request_id}
        if isinstance(outcome, FinishReason):
            logger.debug("sequence %d ended: %s", self.sequence_id, outcome.value, extra=named)
        elif isinstance(outcome, AdmissionRefusedError):
            logger.info("sequence %d was refused: %s", self.sequence_id, outcome, extra=named)
        else:
            logger.warning("sequence %d did not come to its end: %s", self.sequence_id, outcome, extra=named)

    def _expire(self, seconds: float) -> None:
        self.stop(DeadlineExceededError(f"the request was not finished within its {seconds:g} s"))
