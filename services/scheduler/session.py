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

from spool.protos import scheduler_pb2, worker_pb2
from spool.scheduler.errors import SpoolError
from spool.scheduler.messages import EmitTokens, FinishReason, RefusalCause, Suspicion
from spool.services.backend.interface import BackendUnavailableError, DeadlineExceededError
from spool.services.backend.sequence_stream import AdmissionRefusedError, merged
from spool.services.backend.session_codec import request_from_wire, write_end, write_output
from spool.services.observability.request_ids import LONGEST_REQUEST_ID
from spool.services.rpc.backoff import require_positive
from spool.services.rpc.conversion import to_wire
from spool.services.rpc.protocol_version import SPOKEN, version_conflict
from spool.services.scheduler.service import SchedulerService, SchedulerStoppedError, ServiceClosedError

logger = logging.getLogger(__name__)

# For RetryAdvice: how many ends of sequences are remembered, and the limits of the time that clients are asked to wait.
_REMEMBERED_ENDS = 64
_MIN_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 30.0

# Limits of one reply. With log probabilities, a token takes some hundred bytes.
_EVENTS_PER_REPLY = 1024
_TOKENS_PER_REPLY = 16384

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


class SessionEndedError(SpoolError, RuntimeError):
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
    """Runs one session. However the session ends, `run` cancels its sequences before it returns.

    A reply holds at most one event for each sequence: what happens to a sequence that the gateway has not read is
    merged into its event. While as many events wait as the options allow, nothing is read from the gateway.
    """

    def __init__(self, service: SchedulerService, options: SessionOptions, advice: RetryAdvice) -> None:
        self.gateway_id = ""
        self.gateway_version = ""
        self.service = service
        self._options = options
        self._advice = advice
        self._live: dict[int, _SessionSequence] = {}
        self._news: dict[_SessionSequence, None] = {}
        """Sequences with an event that no reply has carried yet, in the order in which they became so."""
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
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
            code = grpc.StatusCode.ABORTED if self.service.fenced else grpc.StatusCode.UNAVAILABLE
            self._closing.set_result(SessionEndedError(code, reason))

    def tell_load(self) -> None:
        """The gateway has to know at once how the cell is."""
        self._has_news.set()

    def fail_all(self, message: str) -> None:
        """Fails every sequence, because there is no target worker."""
        for sequence in list(self._live.values()):
            sequence.stop(BackendUnavailableError(message))

    def changed(self, sequence: _SessionSequence) -> None:
        """Something happened to the sequence that the gateway must learn."""
        news = self._news
        if sequence not in news:
            news[sequence] = None
            if len(news) == 1 or len(news) >= self._options.max_pending_events:
                self._update()

    def ended(self, sequence: _SessionSequence, outcome: FinishReason | Exception) -> None:
        """The sequence has ended, and `changed` follows unless the session ends with it."""
        del self._live[sequence.request_id]
        if isinstance(outcome, SchedulerStoppedError):
            # Ending the session as well lets the gateway submit the sequence elsewhere.
            self._news.pop(sequence, None)
            self.close(str(outcome))
            return
        now = asyncio.get_running_loop().time()
        if isinstance(outcome, AdmissionRefusedError):
            known = outcome.retry_after_seconds
            sequence.retry_after = self._advice.seconds(self.service.core.waiting, now) if known is None else known
        else:
            self._advice.sequence_ended(now)
        self.changed(sequence)

    async def _read(self, requests: AsyncIterator[scheduler_pb2.SessionRequest]) -> None:
        lease = self._options.lease_seconds
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(lease) as deadline:
                async for request in requests:
                    deadline.reschedule(clock() + lease)
                    self._take(request)
                    await self._has_room.wait()
        except TimeoutError:
            reason = f"nothing came from the gateway for {lease:g} s"
            self.service.metrics.lease_expired()
            logger.warning("session of gateway %s: %s", self.gateway_id, reason)
            raise SessionEndedError(grpc.StatusCode.UNAVAILABLE, reason) from None

    async def _write(self, write: Callable[[scheduler_pb2.SessionReply], Awaitable[None]]) -> None:
        await self._opened.wait()
        opened = scheduler_pb2.SessionOpened(
            lease_seconds=self._options.lease_seconds,
            protocol_version=SPOKEN.newest,
            oldest_protocol_version=SPOKEN.oldest,
        )
        await write(self._reply(opened=opened))
        while True:
            try:
                async with asyncio.timeout(min(self._options.lease_seconds / 3, _LOAD_SECONDS)):
                    await self._has_news.wait()
            except TimeoutError:
                logger.debug("nothing to tell gateway %s", self.gateway_id)
            await asyncio.sleep(0)  # the workers' next steps are written first
            await write(self._reply(events=self._events()))

    def _reply(self, **content: Any) -> scheduler_pb2.SessionReply:
        core = self.service.core
        others = max(core.live - len(self._live), 0)
        load = scheduler_pb2.CellLoad(targets=core.targets, sequences_of_others=others)
        return scheduler_pb2.SessionReply(scheduler_epoch=self.service.workers.epoch, load=load, **content)

    def _events(self) -> list[scheduler_pb2.SequenceEvent]:
        """As many as one reply may hold."""
        events: list[scheduler_pb2.SequenceEvent] = []
        tokens = 0
        while self._news and len(events) < _EVENTS_PER_REPLY and tokens < _TOKENS_PER_REPLY:
            sequence = next(iter(self._news))
            del self._news[sequence]
            events.append(sequence.take_event())
            tokens += len(events[-1].tokens)
        self._update()
        return events

    def _update(self) -> None:
        _set(self._has_news, bool(self._news))
        _set(self._has_room, len(self._news) < self._options.max_pending_events)

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
        self.gateway_id, self.gateway_version = opening.gateway_id, opening.version
        conflict = version_conflict("the gateway", opening, "this scheduler", SPOKEN)
        if conflict is not None:
            logger.error("session of gateway %s: %s", self.gateway_id, conflict)
            raise SessionEndedError(grpc.StatusCode.FAILED_PRECONDITION, conflict)
        self._opened.set()

    def _submit(self, submission: scheduler_pb2.SequenceSubmission) -> None:
        request_id = submission.request_id
        if request_id in self._live:
            message = f"request_id {request_id} is taken by a live sequence of the session"
            raise SessionEndedError(grpc.StatusCode.INVALID_ARGUMENT, message)
        sequence_id, named = self.service.new_sequence_id(), submission.client_request_id[:LONGEST_REQUEST_ID]
        sequence = _SessionSequence(self, request_id, sequence_id, named, submission.traceparent)
        self._live[request_id] = sequence
        try:
            request = request_from_wire(sequence.sequence_id, submission)
            timeout = submission.timeout_seconds if submission.HasField("timeout_seconds") else None
            if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
                raise ValueError(f"timeout_seconds is {timeout}, must be above 0")
            targetless = self.service.workers.targetless_seconds
            if targetless > self._options.refuse_without_target_seconds and not submission.admitted_before:
                self.service.metrics.refused_without_target()
                sequence.end(BackendUnavailableError(f"no target worker has been up for {targetless:.0f} s"))
                return
            self.service.enter(request, sequence)
        except ValueError as error:
            self.service.metrics.refused(RefusalCause.INVALID)
            sequence.end(AdmissionRefusedError(RefusalCause.INVALID, str(error)))
        except ServiceClosedError as error:
            self.close(str(error))
        else:
            sequence.entered(timeout)

    def _drop_all(self) -> None:
        for sequence in list(self._live.values()):
            sequence.stop(FinishReason.CANCELLED)


class _SessionSequence:
    """Takes the output of one sequence for its session (spool.services.scheduler.service.SequenceSink)."""

    def __init__(
        self, session: GatewaySession, request_id: int, sequence_id: int, client_request_id: str, traceparent: str
    ) -> None:
        self.request_id = request_id
        self.sequence_id = sequence_id
        self.client_request_id = client_request_id
        self.traceparent = traceparent
        self.retry_after = 0.0
        self._session = session
        self._outcome: FinishReason | Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._target_id = ""
        self._target: worker_pb2.WorkerDescription | None = None
        # Of the next event.
        self._admitted = False
        self._output: list[EmitTokens] = []
        self._queue_seconds = 0.0
        self._fingerprints: list[scheduler_pb2.Fingerprint] = []
        self._suspicion: Suspicion | None = None

    def entered(self, timeout_seconds: float | None) -> None:
        """The service has admitted the sequence, unless the sequence has ended already."""
        if self._outcome is not None:
            return
        logger.debug("sequence %d entered", self.sequence_id, extra=self._named)
        self._admitted = True
        self._session.changed(self)
        if timeout_seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout_seconds, self._expire, timeout_seconds)

    def stop(self, outcome: FinishReason | Exception) -> None:
        """Ends the sequence with this outcome, here and in the service."""
        self.end(outcome)
        self._session.service.cancel(self.sequence_id)

    def push(self, emission: EmitTokens) -> None:
        if self._outcome is None:
            service = self._session.service
            target = service.description_of(emission.target_id)
            # Another start of a worker by the same name may have another fingerprint.
            if emission.target_id != self._target_id or target is not self._target:
                first = not self._target_id
                self._target_id, self._target = emission.target_id, target
                if first:
                    self._queue_seconds = service.metrics.queue_seconds.get(self.sequence_id, 0.0)
                parts = {} if target is None else target.fingerprint
                self._fingerprints.append(scheduler_pb2.Fingerprint(parts=parts, worker_id=emission.target_id))
            self._output.append(emission)
            self._session.changed(self)

    def suspect(self, suspicion: Suspicion) -> None:
        if self._outcome is None:
            self._suspicion = suspicion
            self._session.changed(self)

    def end(self, outcome: FinishReason | Exception) -> None:
        """The first end counts."""
        if self._outcome is not None:
            return
        self._outcome = outcome
        if self._timer is not None:
            self._timer.cancel()
        self._log_end(outcome)
        self._session.ended(self, outcome)

    def take_event(self) -> scheduler_pb2.SequenceEvent:
        """What happened since the last one."""
        event = scheduler_pb2.SequenceEvent(request_id=self.request_id, admitted=self._admitted)
        if self._output:
            write_output(merged(self._output), event)
            event.fingerprints.extend(self._fingerprints)
            event.queue_seconds, self._queue_seconds = self._queue_seconds, 0.0
        if self._suspicion is not None:
            event.suspicion.CopyFrom(to_wire(scheduler_pb2.Suspicion, self._suspicion))
        if self._outcome is not None:
            write_end(self._outcome, self.retry_after, event)
        self._admitted, self._output, self._fingerprints, self._suspicion = False, [], [], None
        return event

    @property
    def _named(self) -> dict[str, str]:
        """For a line of the log."""
        return {"request_id": self.client_request_id, "traceparent": self.traceparent}

    def _log_end(self, outcome: FinishReason | Exception) -> None:
        named = self._named
        if isinstance(outcome, FinishReason):
            logger.debug("sequence %d ended: %s", self.sequence_id, outcome.value, extra=named)
        elif isinstance(outcome, AdmissionRefusedError):
            logger.info("sequence %d was refused: %s", self.sequence_id, outcome, extra=named)
        else:
            logger.warning("sequence %d did not come to its end: %s", self.sequence_id, outcome, extra=named)

    def _expire(self, seconds: float) -> None:
        self.stop(DeadlineExceededError(f"the request was not finished within its {seconds:g} s"))


def _set(event: asyncio.Event, value: bool) -> None:
    if value:
        event.set()
    else:
        event.clear()
