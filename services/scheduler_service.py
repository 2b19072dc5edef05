"""Drives the scheduler core over the workers' step streams: the core decides, this module carries its commands out."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from protos import worker_pb2
from scheduler.config import SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.messages import (
    Command,
    EmitTokens,
    Event,
    FailSequence,
    FinishReason,
    FinishSequence,
    RefusalCause,
    RefuseSequence,
    Role,
    RowResult,
    SendStep,
    SequenceCancelled,
    SequenceRequest,
    SequenceSubmitted,
    StepCompleted,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from scheduler.sampling import SamplingParameters
from services.channel_security import ChannelSecurity
from services.pairing import check_pairing
from services.sequence_stream import AdmissionRefusedError, SequenceFailedError, SequenceStream, TokenDelta
from services.statistics import ServiceStatistics, StatisticsSnapshot
from services.wire import spec_from_wire
from services.worker_link import (
    LinkOptions,
    SchedulerFencedError,
    WorkerEndpoint,
    WorkerLink,
    WorkerUnreachableError,
)

logger = logging.getLogger(__name__)

# A core that asks for a tick in the past again and again must not keep the event loop from its other work.
_SHORTEST_TICK_SECONDS = 0.0005

# Between the epoch of a scheduler and one that takes its place: room for the connections that the former still makes.
_EPOCH_ROOM = 1_000_000_000


class ServiceClosedError(RuntimeError):
    """The service takes no sequences (any more); the message says why."""


class SchedulerStoppedError(SequenceFailedError):
    """The service was closed before the sequence was finished; another scheduler can go on with it."""


class SequenceSink(Protocol):
    """Who takes the output of a sequence. Calls come from the event loop and must not block."""

    def push(self, delta: TokenDelta) -> None: ...

    def end(self, outcome: FinishReason | Exception) -> None:
        """Nothing follows. An exception is a SequenceFailedError or an AdmissionRefusedError."""


class SchedulerService:
    """One cell: a scheduler core with its draft and target workers.

    `scheduler_epoch` must be higher than that of every scheduler that spoke to the workers before, with room for one
    number for each connection made: `time.time_ns()` of the start. Lower ones are fenced off by the workers.

    `security` is that of the workers' channels. All methods belong to one event loop. Leaving the `async with` block,
    or `close`, fails what is unfinished.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        scheduler_epoch: int,
        link_options: LinkOptions | None = None,
        security: ChannelSecurity | None = None,
    ) -> None:
        self.config = config
        self._core = SchedulerCore(config)
        self._epoch = scheduler_epoch
        self._link_options = link_options or LinkOptions()
        self._security = security or ChannelSecurity()
        self._links: dict[str, WorkerLink] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._up: dict[str, asyncio.Event] = {}
        self._sinks: dict[int, SequenceSink] = {}
        self._ids = itertools.count(1)
        self._ticker: asyncio.TimerHandle | None = None
        self._closed_because: str | None = None
        self._closed = asyncio.Event()
        self._fenced = False
        self._targetless_since: float | None = time.monotonic()
        self._statistics = ServiceStatistics(time.monotonic())

    # Workers.

    async def add_workers(self, endpoints: Sequence[WorkerEndpoint]) -> None:
        """Connects to workers and returns once each of them has taken part.

        Raises WorkerUnreachableError, or PairingError where one does not fit another; then none of them is added. From
        then on a worker that is lost is looked for again until `remove_worker`.
        """
        self._check_open()
        added: dict[str, WorkerLink] = {}
        for endpoint in endpoints:
            if endpoint.worker_id in self._links or endpoint.worker_id in added:
                raise ValueError(f"worker_id {endpoint.worker_id} is taken")
            added[endpoint.worker_id] = WorkerLink(endpoint, self._link_options, self._take_epoch, self, self._security)
        try:
            descriptions = dict(
                zip(added, await asyncio.gather(*(link.describe() for link in added.values())), strict=True)
            )
            known = {**self.descriptions, **descriptions}
            for worker_id, description in descriptions.items():
                _check_against(worker_id, description, known)
            self._check_open()
        except BaseException:
            for link in added.values():
                await link.close()
            raise
        self._links |= added
        for worker_id, link in added.items():
            self._up[worker_id] = asyncio.Event()
            self._runs[worker_id] = run = asyncio.create_task(link.run(descriptions[worker_id]))
            run.add_done_callback(functools.partial(self._run_ended, worker_id))
        try:
            async with asyncio.timeout(self._link_options.connect_timeout):
                for worker_id in added:
                    await self._up[worker_id].wait()
        except BaseException as error:
            missing = [worker_id for worker_id in added if not added[worker_id].up]
            for worker_id in added:
                await self.remove_worker(worker_id)
            if isinstance(error, TimeoutError):
                limit = self._link_options.connect_timeout
                raise WorkerUnreachableError(
                    f"workers without an answer to a first step within {limit:g} s: {', '.join(missing)}"
                ) from error
            raise
        self._check_open()

    async def remove_worker(self, worker_id: str, *, dismiss: bool = True) -> None:
        """Stops using a worker: its sequences go on elsewhere, and it drops them. An unknown one is no error.

        Without `dismiss` the worker is not told, for one that is known to be gone.
        """
        link = self._links.pop(worker_id, None)
        if link is None:
            return
        was_up = link.up
        run = self._runs.pop(worker_id)
        self._up.pop(worker_id)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        if was_up:
            self._lost(link, "it was removed")
            if dismiss:
                await link.dismiss()
        await link.close()

    def retry_worker(self, worker_id: str) -> None:
        """A worker that is down is said to be there: looks for it at once. An unknown one is no error."""
        if worker_id in self._links:
            self._links[worker_id].retry_now()

    def trouble_of(self, worker_id: str) -> str:
        """Why a worker that was added is not up."""
        return self._links[worker_id].trouble if worker_id in self._links else ""

    def hear_of_epoch(self, highest: int, speaking: int) -> None:
        """A worker says which scheduler epochs it knows: the highest that ever spoke, and the highest that does now.

        One that speaks now with a higher epoch than this scheduler's has taken its place. One that is silent is gone,
        whatever its clock said, and this scheduler goes above it.
        """
        if speaking > self._epoch:
            self._fenced = True
            self._shut(f"a scheduler with epoch {speaking} has taken over, this one's is {self._epoch}")
        elif highest > self._epoch:
            self._epoch = highest + _EPOCH_ROOM

    @property
    def epoch(self) -> int:
        """The highest that was used."""
        return self._epoch

    @property
    def targetless_seconds(self) -> float:
        """For how long no target worker has been up; 0 while there is one."""
        return 0.0 if self._targetless_since is None else time.monotonic() - self._targetless_since

    @property
    def descriptions(self) -> Mapping[str, worker_pb2.WorkerDescription]:
        """Of every worker that was up at least once, as it was when it last came up."""
        return {worker_id: link.description for worker_id, link in self._links.items() if link.description is not None}

    @property
    def endpoints(self) -> Mapping[str, WorkerEndpoint]:
        """Of every worker that was added and not removed, up or not."""
        return {worker_id: link.endpoint for worker_id, link in self._links.items()}

    @property
    def workers_up(self) -> frozenset[str]:
        return frozenset(worker_id for worker_id, link in self._links.items() if link.up)

    # Sequences.

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
        sampling: SamplingParameters | None = None,
        draft_length: int | None = None,
        logits_digests: bool = False,
        top_logprobs: int | None = None,
        committed_output: Sequence[int] = (),
    ) -> SequenceStream:
        """Enters a sequence; fields as in scheduler.messages.SequenceRequest.

        Raises AdmissionRefusedError, or ServiceClosedError.
        """
        request = SequenceRequest(
            sequence_id=self.new_sequence_id(),
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            sampling=sampling or SamplingParameters(),
            draft_length=draft_length,
            logits_digests=logits_digests,
            top_logprobs=top_logprobs,
            committed_output=tuple(committed_output),
        )
        stream = SequenceStream(request.sequence_id, self.cancel)
        self.enter(request, stream)
        stream.raise_if_refused()
        return stream

    def new_sequence_id(self) -> int:
        """For a request to `enter`."""
        return next(self._ids)

    def enter(self, request: SequenceRequest, sink: SequenceSink) -> None:
        """Enters a sequence whose output goes to `sink`, at once if it is refused or ends here.

        Raises AdmissionRefusedError for tokens that mean nothing, and ServiceClosedError; then `sink` hears nothing.
        """
        self._check_open()
        self._check_vocabulary(request)
        self._sinks[request.sequence_id] = sink
        self._statistics.sequence_started(time.monotonic())
        self._handle(SequenceSubmitted(request))

    def cancel(self, sequence_id: int) -> None:
        """The sequence's stream ends at once; one that has ended, or never was, is no error."""
        if sequence_id in self._sinks:
            self._handle(SequenceCancelled(sequence_id))

    # Life and numbers.

    def statistics(self) -> StatisticsSnapshot:
        return self._statistics.snapshot(time.monotonic())

    def reset_statistics(self) -> None:
        """Counts from here on, for measurements after a warm-up."""
        self._statistics.reset(time.monotonic())

    @property
    def core(self) -> SchedulerCore:
        """To look at (`snapshot`, `check_integrity`); events go through this service alone."""
        return self._core

    @property
    def closed_because(self) -> str | None:
        """Why the service takes no sequences any more; None while it does."""
        return self._closed_because

    @property
    def fenced(self) -> bool:
        """Whether another scheduler has taken the workers over; the service is closed then."""
        return self._fenced

    async def wait_closed(self) -> str:
        """Waits until the service takes no sequences any more, and says why."""
        await self._closed.wait()
        return self._closed_because or ""

    async def close(self, reason: str = "the scheduler service is shutting down") -> None:
        """Fails every unfinished sequence with the reason, and leaves the workers."""
        self._shut(reason)
        runs = list(self._runs.values())
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links.values()))
        self._links.clear()
        self._runs.clear()
        self._up.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # What links say (LinkListener).

    def check_admission(self, link: WorkerLink, description: worker_pb2.WorkerDescription) -> None:
        _check_against(link.endpoint.worker_id, description, self.descriptions)

    def link_up(self, link: WorkerLink, description: worker_pb2.WorkerDescription) -> None:
        endpoint = link.endpoint
        logger.info("worker %s is up at %s", endpoint.worker_id, endpoint.address)
        if endpoint.worker_id in self._up:
            self._up[endpoint.worker_id].set()
        if endpoint.role is Role.TARGET:
            self._targetless_since = None
        self._handle(WorkerJoined(spec_from_wire(endpoint.worker_id, description)))

    def link_down(self, link: WorkerLink, reason: str) -> None:
        self._lost(link, reason)

    def step_replied(
        self, link: WorkerLink, step: SendStep, results: tuple[RowResult, ...], timings: worker_pb2.StepTimings
    ) -> None:
        endpoint = link.endpoint
        self._statistics.step_replied(endpoint.role, endpoint.worker_id, step.step_id, timings, time.monotonic())
        self._statistics.rows_answered(results)
        self._handle(StepCompleted(endpoint.worker_id, step.step_id, results, timings.total))

    # The core.

    def _handle(self, event: Event) -> None:
        """Gives the core an event and carries out what it commands."""
        if self._closed_because is not None:
            return
        loop = asyncio.get_running_loop()
        began = time.perf_counter()
        try:
            commands = self._core.handle(event, loop.time())
        except Exception as error:
            # A core that has lost its way must not go on deciding what is committed.
            logger.exception("the scheduler core failed on %s", event)
            self._shut(f"the scheduler core failed: {type(error).__name__}: {error}")
            return
        self._statistics.core_ran(time.perf_counter() - began)
        for command in commands:
            self._carry_out(command)
        self._plan_tick(loop)

    def _carry_out(self, command: Command) -> None:
        now = time.monotonic()
        match command:
            case SendStep():
                link = self._links.get(command.worker_id)
                if link is not None and link.up:
                    self._statistics.step_sent(
                        link.endpoint.role, command.worker_id, command.step_id, command.group, now
                    )
                    link.send(command)
            case EmitTokens():
                self._statistics.tokens_emitted(command)
                delta = TokenDelta(
                    command.tokens, command.drafted, command.accepted, command.logits_digests, command.logprobs
                )
                self._sinks[command.sequence_id].push(delta)
            case FinishSequence():
                self._statistics.sequence_finished(command.sequence_id, now)
                self._sinks.pop(command.sequence_id).end(command.reason)
            case FailSequence():
                self._statistics.sequence_failed(command.sequence_id, now)
                self._sinks.pop(command.sequence_id).end(SequenceFailedError(command.error))
            case RefuseSequence():
                self._statistics.sequence_refused(command.sequence_id, now)
                self._sinks.pop(command.sequence_id).end(AdmissionRefusedError(command.cause, command.message))

    def _plan_tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        deadline = self._core.next_deadline()
        if deadline is not None and self._closed_because is None:
            self._ticker = loop.call_at(max(deadline, loop.time() + _SHORTEST_TICK_SECONDS), self._handle, Tick())

    def _lost(self, link: WorkerLink, reason: str) -> None:
        endpoint = link.endpoint
        logger.warning("worker %s left: %s", endpoint.worker_id, reason)
        self._statistics.worker_lost(endpoint.role, endpoint.worker_id)
        if endpoint.role is Role.TARGET and not self._target_is_up(without=endpoint.worker_id):
            self._targetless_since = time.monotonic()
        self._handle(WorkerLost(endpoint.worker_id))

    def _run_ended(self, worker_id: str, run: asyncio.Task[None]) -> None:
        """A link's task ends by being cancelled; anything else is the end of the service."""
        if not run.cancelled() and (error := run.exception()) is not None:
            self._fenced = self._fenced or isinstance(error, SchedulerFencedError)
            logger.error("the link to worker %s ended", worker_id, exc_info=error)
            self._shut(f"the link to worker {worker_id} ended: {type(error).__name__}: {error}")

    def _shut(self, reason: str) -> None:
        """Takes no more events, and fails what is unfinished. The first reason counts."""
        if self._closed_because is not None:
            return
        self._closed_because = reason
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        now = time.monotonic()
        sinks = dict(self._sinks)
        self._sinks.clear()
        for sequence_id, sink in sinks.items():
            self._statistics.sequence_failed(sequence_id, now)
            sink.end(SchedulerStoppedError(reason))
        # It must not speak to workers any more that may have another scheduler now.
        for run in self._runs.values():
            run.cancel()
        self._closed.set()

    def _take_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def _target_is_up(self, without: str) -> bool:
        return any(
            link.up and link.endpoint.role is Role.TARGET
            for worker_id, link in self._links.items()
            if worker_id != without
        )

    def _check_open(self) -> None:
        if self._closed_because is not None:
            raise ServiceClosedError(self._closed_because)

    def _check_vocabulary(self, request: SequenceRequest) -> None:
        """The core takes tokens as they come; a worker would fail the sequence on the first that means nothing."""
        sizes = [d.vocabulary_size for d in self.descriptions.values() if d.role == worker_pb2.ROLE_TARGET]
        size = min(sizes, default=0)
        if not size:
            return
        for name, tokens in (
            ("prompt", request.prompt),
            ("committed_output", request.committed_output),
            ("logit_bias", request.sampling.logit_bias),
        ):
            for token in tokens:
                if not 0 <= token < size:
                    message = f"{name} holds token id {token}, must be between 0 and {size - 1}"
                    raise AdmissionRefusedError(RefusalCause.INVALID, message)


def _check_against(
    worker_id: str,
    description: worker_pb2.WorkerDescription,
    known: Mapping[str, worker_pb2.WorkerDescription],
) -> None:
    check_pairing(worker_id, description, [(name, other) for name, other in known.items() if name != worker_id])
