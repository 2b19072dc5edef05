"""Connects the scheduler core to its workers and clients: the core decides, this module carries out its commands."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, Self

from spool.protos import worker_pb2
from spool.scheduler.config import SchedulerConfig
from spool.scheduler.core import SchedulerCore
from spool.scheduler.errors import SpoolError
from spool.scheduler.messages import (
    Command,
    DraftingReport,
    EmitTokens,
    Event,
    FailSequence,
    FinishReason,
    FinishSequence,
    KvMoved,
    MoveKv,
    RefuseSequence,
    RowResult,
    SendStep,
    SequenceCancelled,
    SequenceRequest,
    SequenceSubmitted,
    StepCompleted,
    SuspectSequence,
    Suspicion,
    WorkerDrained,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkersSettled,
)
from spool.services.backend.sequence_stream import AdmissionRefusedError, SequenceFailedError, SequenceStream
from spool.services.observability.observer import FAILED, REFUSED, SequenceEnd, ServiceObserver, StepTimings
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.rpc.worker_codec import spec_from_wire
from spool.services.scheduler.epochs import EpochAuthority, SupersededError
from spool.services.scheduler.telemetry.metrics import SchedulerMetrics
from spool.services.scheduler.telemetry.statistics import ServiceStatistics, StatisticsSnapshot
from spool.services.scheduler.workers.worker_link import (
    LinkOptions,
    SchedulerFencedError,
    WorkerEndpoint,
    WorkerUnreachableError,
)
from spool.services.scheduler.workers.worker_set import WorkerSet

logger = logging.getLogger(__name__)

# A move of KV that takes longer fails, and the KV is computed again.
_MOVE_TIMEOUT_SECONDS = 10.0


class ServiceClosedError(SpoolError, RuntimeError):
    """The service has closed and takes no sequences; the message says why."""


class SchedulerStoppedError(SequenceFailedError):
    """The service was closed before the sequence was finished; another scheduler can go on with it."""


class SequenceSink(Protocol):
    """Receives the output of a sequence. Calls come from the event loop and must not block.

    `client_request_id` is for logs, `traceparent` for traces.
    """

    client_request_id: str
    traceparent: str

    def push(self, emission: EmitTokens) -> None: ...

    def suspect(self, suspicion: Suspicion) -> None:
        """The sequence may be the reason why a target was lost."""

    def end(self, outcome: FinishReason | Exception) -> None:
        """The last call. An exception is a SequenceFailedError or an AdmissionRefusedError."""


class SchedulerService:
    """One cell: a scheduler core with its draft and target workers.

    `scheduler_epoch` must be higher than every epoch with which another scheduler spoke to the workers before, since
    workers refuse lower ones; every connection takes the next number. `epochs` is the authority that gave it out; a
    scheduler whose workers no other one can reach needs none.

    `security` is that of the workers' channels. `observers` are called with everything that happens. All methods belong
    to one event loop. `close`, or leaving the `async with` block, fails every unfinished sequence.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        scheduler_epoch: int,
        epochs: EpochAuthority | None = None,
        link_options: LinkOptions | None = None,
        security: ChannelSecurity | None = None,
        observers: Iterable[ServiceObserver] = (),
    ) -> None:
        self.config = config
        self._core = SchedulerCore(config)
        self._targets = 0
        self.workers = WorkerSet(
            self, self._check_open, link_options or LinkOptions(), security or ChannelSecurity(), scheduler_epoch
        )
        self._kv_moves: set[asyncio.Task[None]] = set()
        self._drained: dict[str, asyncio.Event] = {}
        self._sinks: dict[int, SequenceSink] = {}
        self._ids = itertools.count(1)
        self._planning: asyncio.Handle | None = None
        """The next plan, at the end of this turn of the event loop, if the core has news."""
        self._closed_because: str | None = None
        self._closed = asyncio.Event()
        self._fenced = False
        self._epochs = epochs
        self._renewing = asyncio.Lock()
        self._statistics = ServiceStatistics(time.monotonic())
        self.metrics = SchedulerMetrics()
        self.observers = [self._statistics, self.metrics, *observers]

    # Workers.

    async def remove_worker(self, worker_id: str, drain_seconds: float = 0.0) -> None:
        """Stops using a worker; an unknown one is no error.

        The sequences of a target have `drain_seconds` to move to other targets one by one, with their KV where moving
        the KV is faster than computing it. The KV of those left after that is computed again elsewhere. The targets
        that a draft serves have the same time to go to another draft, which computes its KV itself; they decode on
        meanwhile.
        """
        link = self.workers.find(worker_id)
        if link is not None and drain_seconds > 0:
            await self._drain(worker_id, drain_seconds)
            if self.workers.links.get(worker_id) is not link:
                return  # another start has taken its place meanwhile
        await self.workers.remove(worker_id)

    async def _drain(self, worker_id: str, seconds: float) -> None:
        drained = self._drained.setdefault(worker_id, asyncio.Event())
        self._handle(WorkerDraining(worker_id))
        try:
            async with asyncio.timeout(seconds):
                await drained.wait()
        except TimeoutError:
            logger.warning("worker %s was not drained within %.1f s", worker_id, seconds)
        finally:
            self._drained.pop(worker_id, None)

    async def hear_of_epoch(self, highest: int) -> None:
        """A worker reports the highest scheduler epoch that ever spoke to it.

        A higher one than this scheduler's has replaced it, if the authority says so; then this one closes. Else it
        continues above that epoch. Raises ValueError for an epoch that no authority can have given out.
        """
        async with self._renewing:
            if highest <= self.workers.epoch or self._closed_because is not None:
                return
            try:
                if self._epochs is None:
                    raise SupersededError(f"a scheduler with epoch {highest} has taken over")
                self.workers.raise_epoch(await self._epochs.renew(self.workers.epoch, highest))
            except SupersededError as error:
                self._fenced = True
                self._shut(str(error))

    # Sequences.

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        client_request_id: str = "",
        traceparent: str = "",
        **fields: Any,
    ) -> SequenceStream:
        """Enters a sequence; `fields` are others of SequenceRequest. `client_request_id` is for logs, `traceparent` for
        traces.

        Raises AdmissionRefusedError, or ServiceClosedError.
        """
        request = SequenceRequest(self.new_sequence_id(), tuple(prompt), max_tokens, **fields)
        stream = SequenceStream(request.sequence_id, self.cancel, client_request_id, traceparent)
        self.enter(request, stream)
        if isinstance(stream.outcome, AdmissionRefusedError):
            raise stream.outcome
        return stream

    def settle(self) -> None:
        """Whoever belongs to the cell has joined by now: see `WorkersSettled`."""
        self._handle(WorkersSettled())

    def description_of(self, target_id: str) -> worker_pb2.WorkerDescription | None:
        """What a target said of itself when the connection with it was made; None of one that was never up."""
        link = self.workers.links.get(target_id)
        return None if link is None else link.description

    def new_sequence_id(self) -> int:
        """A new id for a request to `enter`."""
        return next(self._ids)

    def enter(self, request: SequenceRequest, sink: SequenceSink) -> None:
        """Enters a sequence whose output goes to `sink`, which may be called before this method returns.

        Token ids are not looked at: a gateway has checked those of its clients, and a worker refuses rows with tokens
        that its model does not have. Raises ServiceClosedError; then `sink` is never called.
        """
        self._check_open()
        self._sinks[request.sequence_id] = sink
        now = time.monotonic()
        for observer in self.observers:
            observer.sequence_entered(request, sink.client_request_id, sink.traceparent, now)
        self._handle(SequenceSubmitted(request))

    def cancel(self, sequence_id: int) -> None:
        """Ends the sequence's stream at once; a sequence that has ended or never existed is no error."""
        if sequence_id in self._sinks:
            self._handle(SequenceCancelled(sequence_id))

    # Life and numbers.

    def statistics(self) -> StatisticsSnapshot:
        return self._statistics.snapshot(time.monotonic(), self._core.snapshot())

    def reset_statistics(self) -> None:
        """Starts to count again, for measurements after a warm-up."""
        self._statistics.reset(time.monotonic(), self._core.snapshot())

    @contextmanager
    def observed(self, observer: ServiceObserver) -> Iterator[None]:
        """Adds an observer for as long as the block lasts."""
        self.observers.append(observer)
        try:
            yield
        finally:
            self.observers.remove(observer)

    @property
    def core(self) -> SchedulerCore:
        """For reading only (`snapshot`, `sequences`); only this service gives the core events."""
        return self._core

    @property
    def closed_because(self) -> str | None:
        """Why the service has closed; None while it takes sequences."""
        return self._closed_because

    @property
    def fenced(self) -> bool:
        """Whether another scheduler has taken the workers over; the service is closed then."""
        return self._fenced

    async def wait_closed(self) -> str:
        """Waits until the service has closed, and returns the reason."""
        await self._closed.wait()
        return self._closed_because or ""

    async def close(self, reason: str = "the scheduler service is shutting down") -> None:
        """Fails every unfinished sequence with the reason, and leaves the workers."""
        self._shut(reason)
        for move in self._kv_moves:
            move.cancel()
        await asyncio.gather(*self._kv_moves, return_exceptions=True)
        await self.workers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # What workers say (WorkerListener).

    def worker_up(self, endpoint: WorkerEndpoint, description: worker_pb2.WorkerDescription) -> None:
        self._handle(WorkerJoined(spec_from_wire(endpoint.worker_id, description)))

    def worker_lost(self, endpoint: WorkerEndpoint, reason: str, blameless: bool) -> None:
        homes = {worker.worker_id: worker.sequences for worker in self._core.snapshot().workers}
        for observer in self.observers:
            observer.worker_lost(endpoint.role, endpoint.worker_id, homes.get(endpoint.worker_id, 0))
        self._handle(WorkerLost(endpoint.worker_id, reason, blameless))

    def step_replied(
        self,
        endpoint: WorkerEndpoint,
        step: SendStep,
        results: tuple[RowResult, ...],
        timings: StepTimings,
        drafting: DraftingReport | None,
    ) -> None:
        now = time.monotonic()
        completed = StepCompleted(endpoint.worker_id, step.step_id, results, timings.total, drafting, timings.drafting)
        for observer in self.observers:
            observer.step_replied(step, completed, timings, now)
        self._handle(completed)

    def draft_registered(self, endpoint: WorkerEndpoint, seconds: float, busy_seconds: float) -> None:
        now = time.monotonic()
        for observer in self.observers:
            observer.draft_registered(endpoint.worker_id, seconds, busy_seconds, now)

    def link_broken(self, endpoint: WorkerEndpoint, error: BaseException) -> None:
        self._fenced = self._fenced or isinstance(error, SchedulerFencedError)
        self._shut(f"the link to worker {endpoint.worker_id} ended: {type(error).__name__}: {error}")

    # The core.

    def _handle(self, event: Event) -> None:
        """Gives the core an event. All events of one turn of the event loop are planned for together."""
        if self._closed_because is not None:
            return
        loop = asyncio.get_running_loop()
        if self._planning is None:
            # First of all, so that steps leave before others are woken by what they will read.
            self._planning = loop.call_soon(self._plan)
        self._run_core(functools.partial(self._core.apply, event, loop.time()))

    def _plan(self) -> None:
        self._planning = None
        if self._closed_because is None:
            self._run_core(self._core.plan)

    def _run_core(self, run: Callable[[], list[Command]]) -> None:
        """Carries out what the core commands."""
        began = time.perf_counter()
        try:
            commands = run()
        except Exception as error:
            # After an error the core's state may be wrong, and wrong tokens must not be committed.
            logger.exception("the scheduler core failed in %s", run)
            self._shut(f"the scheduler core failed: {type(error).__name__}: {error}")
            return
        seconds = time.perf_counter() - began
        for observer in self.observers:
            observer.core_ran(seconds)
        emitted = [command for command in commands if type(command) is EmitTokens]
        if emitted:
            for observer in self.observers:
                observer.tokens_emitted(emitted)
        for command in commands:
            self._carry_out(command)
        if self._core.targets != self._targets:
            self._targets = self._core.targets
            for observer in self.observers:
                observer.targets_changed(self._targets)

    def _carry_out(self, command: Command) -> None:
        match command:
            case EmitTokens():
                self._sinks[command.sequence_id].push(command)
            case SendStep():
                self._send(command)
            case MoveKv():
                task = asyncio.create_task(self._move_kv(command))
                self._kv_moves.add(task)
                task.add_done_callback(self._kv_moves.discard)
            case WorkerDrained():
                self._end_drain(command.worker_id)
            case SuspectSequence():
                self._sinks[command.sequence_id].suspect(command.suspicion)
            case FinishSequence():
                self._end(command.sequence_id, SequenceEnd(command.reason.value), command.reason)
            case FailSequence():
                error = SequenceFailedError(command.error)
                self._end(command.sequence_id, SequenceEnd(FAILED, command.error), error)
            case RefuseSequence():
                seconds = command.retry_after_seconds
                refusal = AdmissionRefusedError(command.cause, command.message, retry_after_seconds=seconds)
                self._end(command.sequence_id, SequenceEnd(REFUSED, command.message, command.cause), refusal)

    def _send(self, step: SendStep) -> None:
        link = self.workers.find(step.worker_id)
        if link is None:
            return
        now = time.monotonic()
        for observer in self.observers:
            observer.step_sent(step, now)
        link.send(step)

    def _end(self, sequence_id: int, end: SequenceEnd, outcome: FinishReason | Exception) -> None:
        now = time.monotonic()
        for observer in self.observers:
            observer.sequence_ended(sequence_id, end, now)
        self._sinks.pop(sequence_id).end(outcome)

    async def _move_kv(self, move: MoveKv) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        sequence_id = move.opening.sequence_id
        try:
            source, destination = self.workers.find(move.source_id), self.workers.find(move.destination_id)
            if source is None or destination is None:
                raise WorkerUnreachableError(f"worker {move.source_id} or {move.destination_id} is gone")
            reply = await destination.import_kv(move, source, _MOVE_TIMEOUT_SECONDS)
        except Exception as error:  # whatever it was: without an answer the core would wait for the KV  # noqa: BLE001
            sink = self._sinks.get(sequence_id)
            named = {"request_id": "" if sink is None else sink.client_request_id}
            logger.warning("KV of sequence %d was not moved: %s", sequence_id, error, extra=named)
            self._handle(KvMoved(move.move_id, False, loop.time() - began))
        else:
            self._handle(KvMoved(move.move_id, True, loop.time() - began, reply.bytes))

    def _end_drain(self, worker_id: str) -> None:
        if worker_id in self._drained:
            self._drained[worker_id].set()

    def _shut(self, reason: str) -> None:
        """Closes the service to events and fails every unfinished sequence. The first reason counts."""
        if self._closed_because is not None:
            return
        self._closed_because = reason
        for worker_id in self._drained:
            self._end_drain(worker_id)
        for sequence_id in list(self._sinks):
            self._end(sequence_id, SequenceEnd(FAILED, reason), SchedulerStoppedError(reason))
        # The workers may belong to another scheduler now.
        self.workers.stop()
        self._closed.set()

    def _check_open(self) -> None:
        if self._closed_because is not None:
            raise ServiceClosedError(self._closed_because)
