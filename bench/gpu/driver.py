"""A scheduler core and its workers in one process and thread, in real time, without gRPC.

Steps run one after the other, in the order in which the core sends them, each as its worker would run it: through the
messages of the protocol and the step executor. So target and draft take turns on their device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler.config import SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.messages import (
    EmitTokens,
    Event,
    FailSequence,
    FinishSequence,
    RefuseSequence,
    Role,
    SendStep,
    SequenceRequest,
    SequenceSubmitted,
    StepCompleted,
    WorkerJoined,
)
from services.rpc.worker_codec import result_from_wire, spec_from_wire, step_to_wire
from services.worker.executor import StepExecutor


@dataclass(slots=True)
class Output:
    """`rounds` are (drafted, accepted, committed) of each round; what comes out of the prefill is none."""

    tokens: list[int] = field(default_factory=list)
    logits_digests: list[int] = field(default_factory=list)
    rounds: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that a worker ran. Times are seconds; `verified` counts its rows that are no prefill."""

    role: Role
    total: float
    prepare: float
    forward: float
    sample: float
    rows: int
    verified: int
    packed_rows: int
    padding_rows: int


@dataclass(slots=True)
class RunRecord:
    """What came of some requests. `seconds` from the first submission to the last end, `core_seconds` of them in the
    scheduler core."""

    outputs: dict[int, Output] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    seconds: float = 0.0
    core_seconds: float = 0.0


class InProcessCell:
    """One scheduler with its workers. Sequences come and go over several runs; what was measured of steps is kept.

    `scheduler_epoch` must be above that of every scheduler that the workers have heard before.
    """

    def __init__(self, config: SchedulerConfig, workers: Mapping[str, StepExecutor[Any]], scheduler_epoch: int) -> None:
        self._core = SchedulerCore(config)
        self._workers = workers
        self._epoch = scheduler_epoch
        self._steps: deque[SendStep] = deque()
        self._unfinished: set[int] = set()
        self._record = RunRecord()
        for worker_id, executor in workers.items():
            # All share one device, and steps run in the order sent: so that `auto` knows that nothing overlaps.
            spec = replace(spec_from_wire(worker_id, executor.describe()), shares_cores=True)
            self._handle(WorkerJoined(spec))

    def run(self, requests: Sequence[SequenceRequest]) -> RunRecord:
        """Brings all requests to their end. Raises RuntimeError where one is refused or fails, or nothing goes on."""
        self._record = record = RunRecord({request.sequence_id: Output() for request in requests})
        self._unfinished = set(record.outputs)
        started = time.perf_counter()
        for request in requests:
            self._handle(SequenceSubmitted(request))
        while self._unfinished:
            self._go_on()
        record.seconds = time.perf_counter() - started
        # What is left releases pages, or drafts for sequences that have ended.
        self._record = RunRecord()
        while self._steps:
            self._go_on()
        self._core.check_integrity()
        for executor in self._workers.values():
            executor.check_integrity()
        return record

    def _go_on(self) -> None:
        if self._steps:
            self._handle(self._execute(self._steps.popleft()))
            return
        deadline = self._core.next_deadline()
        if deadline is None:
            raise RuntimeError(f"standstill: {len(self._unfinished)} sequences never ended")
        time.sleep(max(0.0, deadline - time.perf_counter()))
        self._handle()

    def _execute(self, step: SendStep) -> StepCompleted:
        executor = self._workers[step.worker_id]
        reply = executor.execute(step_to_wire(step, executor.worker_epoch, self._epoch), executor.clock())
        if reply.error:
            raise RuntimeError(f"{step.worker_id} refused a step: {reply.error}")
        timings = reply.timings
        if step.rows:
            self._record.steps.append(
                StepRecord(
                    role=executor.role,
                    total=timings.total,
                    prepare=timings.prepare,
                    forward=timings.forward,
                    sample=timings.sample,
                    rows=len(step.rows),
                    verified=step.group.rows if step.group is not None else 0,
                    packed_rows=timings.packed_rows,
                    padding_rows=timings.padding_rows,
                )
            )
        return StepCompleted(step.worker_id, step.step_id, tuple(map(result_from_wire, reply.rows)), timings.total)

    def _handle(self, *events: Event) -> None:
        began = time.perf_counter()
        commands = self._core.handle(events, began)
        self._record.core_seconds += time.perf_counter() - began
        for command in commands:
            match command:
                case SendStep():
                    self._steps.append(command)
                case EmitTokens():
                    output = self._record.outputs[command.sequence_id]
                    if output.tokens:
                        output.rounds.append((command.drafted, command.accepted, len(command.tokens)))
                    output.tokens += command.tokens
                    output.logits_digests += command.logits_digests
                case FinishSequence():
                    self._unfinished.discard(command.sequence_id)
                case FailSequence():
                    raise RuntimeError(f"sequence {command.sequence_id} failed: {command.error}")
                case RefuseSequence():
                    raise RuntimeError(f"sequence {command.sequence_id} was refused: {command.message}")
