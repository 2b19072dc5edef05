"""How fast the scheduler core decides, with simulated workers, in JSON.

A *row decision* is one row of a step: planned into the step, and its answer applied. Workers answer in virtual time;
only the processor time of `SchedulerCore.handle` is measured. A sequence that ends is replaced by a new one at once.
The default policy drafts in every round; `--policy auto` may find that drafting does not pay.

    python -m bench.record core_speed -- python -m bench.core_speed
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.core import SchedulerCore
from spool.scheduler.messages import (
    DraftingReport,
    EmitTokens,
    Event,
    FailSequence,
    FinishSequence,
    RefuseSequence,
    Role,
    Row,
    RowResult,
    RowStatus,
    SendStep,
    SequenceRequest,
    SequenceSubmitted,
    StepCompleted,
    WorkerJoined,
    WorkerSpec,
)
from spool.services.launch.process_tuning import keep_loaded_objects


@dataclass(frozen=True, slots=True)
class Pace:
    """How long workers take for a step, without a model: seconds of a target's step, by itself and for each packed row;
    and of a draft's pass, in the same way.

    The defaults are those of an 8B target and a 0.6B draft on an H200.
    """

    target_step: float = 0.005
    target_row: float = 0.00002
    draft_pass: float = 0.0009
    draft_row: float = 0.000002

    def seconds(self, role: Role, rows: Iterable[tuple[int, int]]) -> float:
        """Of a step whose rows have so many tokens to feed, and propose so many."""
        return sum(self.passes(role, rows))

    def passes(self, role: Role, rows: Iterable[tuple[int, int]]) -> list[float]:
        """Of each pass of such a step: a draft takes one for each token of the longest proposal."""
        pairs = list(rows)
        if not pairs:
            return []
        packed = sum(tokens for tokens, _ in pairs)
        if role is Role.TARGET:
            return [self.target_step + self.target_row * packed]
        later = (sum(proposed > done for _, proposed in pairs) for done in range(1, max(most for _, most in pairs)))
        return [self.draft_pass + self.draft_row * fed for fed in (packed, *later)]


_PACE = Pace(target_step=0.01, target_row=0.00005, draft_pass=0.0005, draft_row=0.00001)
_LATENCY_SECONDS = 0.001
_PROMPT_LENGTHS = (16, 40, 90, 200)


@dataclass(frozen=True)
class Load:
    """What the core is given. `acceptance` is the chance of every draft token, given those before it. Without `drafts`
    every round is plain, unless with `heads` (1) the targets propose themselves, in their own time. The window is full
    once the core has decided `warm_up` rounds of each of its sequences."""

    pool: int = 10_000
    window: int = 512
    batch_size: int = 8
    draft_length: int = 4
    policy: str = "ragged"
    targets: int = 1
    drafts: int = 1
    heads: int = 0
    acceptance: float = 0.7
    longest_output: int = 300
    warm_up: int = 4
    rows: int = 200_000

    def config(self) -> SchedulerConfig:
        return SchedulerConfig(
            batch_size=self.batch_size,
            max_running=-(-self.window // self.targets),
            policy=Policy(self.policy),
            draft_length=self.draft_length,
            max_queued_sequences=self.pool,
        )


@dataclass(frozen=True)
class CoreSpeed:
    """What was measured, after a warm-up that filled the window. `rows` are the row decisions made; the workers took
    `virtual_seconds` for them. Other times are processor seconds of `handle` calls."""

    rows: int
    emitted_tokens: int
    virtual_seconds: float
    rows_per_second: float
    handle_seconds_p50: float
    handle_seconds_p99: float


class CountingTarget:
    """Answers rows without looking at their tokens. `drafts` says of each draft worker until when it is busy."""

    def __init__(self, spec: WorkerSpec, acceptance: float, pace: Pace, drafts: dict[str, float]) -> None:
        self.spec = spec
        self._acceptance = int(acceptance * 1024)
        self._pace = pace
        self._drafts = drafts
        self.steps: deque[SendStep] = deque()
        self._ends: dict[int, int] = {}
        """Where the rows that follow end."""
        self._proposed_at: dict[int, float] = {}
        """When the draft worker has proposed for a sequence."""

    def answer(self, step: SendStep, now: float) -> StepCompleted:
        """To a step that begins now. Proposals that come later than the step may wait for them are not there."""
        asked = [row for row in step.rows if row.verify]
        drafting, report, late = 0.0, None, set[int]()
        if step.grant is not None:
            times = {row.sequence_id: self._proposed_at.get(row.sequence_id, now) for row in asked}
            drafting = min(max(0.0, max(times.values(), default=now) - now), step.wait_seconds)
            late = {number for number, at in times.items() if at > now + drafting}
            report = DraftingReport(True, len(asked), len(asked) - len(late))
        elif asked:
            drafting = self._pace.seconds(Role.DRAFT, ((1, row.verify) for row in step.rows))
        results = tuple(self._answer(row, 0 if row.sequence_id in late else row.verify) for row in step.rows)
        fed = ((row.end - row.kv_len + result.verified, 0) for row, result in zip(step.rows, results, strict=True))
        seconds = self._pace.seconds(Role.TARGET, fed) + drafting
        wanted = [row for row in step.rows if row.draft_length]
        if step.grant is not None and wanted:
            begins = max(now + seconds, self._drafts[step.grant.draft_id])
            ends = begins + self._pace.seconds(Role.DRAFT, ((2, row.draft_length) for row in wanted))
            self._drafts[step.grant.draft_id] = ends
            self._proposed_at.update(dict.fromkeys((row.sequence_id for row in wanted), ends))
        return StepCompleted(step.worker_id, step.step_id, results, seconds, report, drafting)

    def _answer(self, row: Row, verified: int) -> RowResult:
        fed = self._ends[row.sequence_id] if row.follows else row.end
        if not row.sample:
            return RowResult(row.sequence_id, RowStatus.OK, fed, 0)
        accepted = 0
        for place in range(verified):
            if _mixed(row.sequence_id, fed + place) & 1023 >= self._acceptance:
                break
            accepted += 1
        self._ends[row.sequence_id] = fed + accepted + 1
        tokens = (7,) * (accepted + 1)
        return RowResult(row.sequence_id, RowStatus.OK, fed + accepted, 0, tokens, accepted, verified=verified)


class _Run:
    """The core, its workers and the virtual clock."""

    def __init__(self, load: Load, pace: Pace, latency: float) -> None:
        self.core = SchedulerCore(load.config())
        self._load = load
        self._pace = pace
        self._latency = latency
        self._targets: dict[str, CountingTarget] = {}
        self._drafts: dict[str, float] = {}
        self._now = 0.0
        self._due: list[tuple[float, int, CountingTarget, StepCompleted]] = []
        self._submitted = 0
        self._clear()
        for role, count in ((Role.TARGET, load.targets), (Role.DRAFT, load.drafts)):
            for index in range(count):
                head = "head" if load.heads and role is Role.TARGET else ""
                self._join(WorkerSpec(f"{role.value}-{index}", role, 16, 2_000_000, 16384, 4096, own_draft_id=head))
        for _ in range(load.pool):
            self._submit()

    def warm_up(self) -> None:
        while self._rounds < self._load.warm_up * self._load.window:
            self._next()
        self._clear()

    def measure(self) -> CoreSpeed:
        while self._rows < self._load.rows:
            self._next()
        ordered = sorted(self._seconds)
        return CoreSpeed(
            rows=self._rows,
            emitted_tokens=self._emitted_tokens,
            virtual_seconds=self._now - self._began,
            rows_per_second=self._rows / sum(ordered),
            handle_seconds_p50=ordered[len(ordered) // 2],
            handle_seconds_p99=ordered[len(ordered) * 99 // 100],
        )

    def _clear(self) -> None:
        self._began = self._now
        self._seconds = array("d")
        self._rows = self._rounds = self._emitted_tokens = 0

    def _join(self, spec: WorkerSpec) -> None:
        if spec.role is Role.TARGET:
            self._targets[spec.worker_id] = CountingTarget(spec, self._load.acceptance, self._pace, self._drafts)
        else:
            self._drafts[spec.worker_id] = 0.0
        self._handle(WorkerJoined(spec))

    def _submit(self) -> None:
        self._submitted += 1
        number = _mixed(self._submitted, 0)
        prompt = (1,) * _PROMPT_LENGTHS[number % len(_PROMPT_LENGTHS)]
        max_tokens = 1 + number // 8 % self._load.longest_output
        self._handle(SequenceSubmitted(SequenceRequest(self._submitted, prompt, max_tokens)))

    def _next(self) -> None:
        self._now, _, target, answer = heapq.heappop(self._due)
        target.steps.popleft()
        if target.steps:
            self._start(target)
        self._handle(answer)

    def _handle(self, *events: Event) -> None:
        began = time.thread_time()
        commands = self.core.handle(events, self._now)
        self._seconds.append(time.thread_time() - began)
        ended = 0
        for command in commands:
            match command:
                case SendStep():
                    target = self._targets[command.worker_id]
                    self._rows += len(command.rows)
                    target.steps.append(command)
                    if len(target.steps) == 1:
                        self._start(target)
                case EmitTokens():
                    self._rounds += 1
                    self._emitted_tokens += len(command.tokens)
                case FinishSequence():
                    ended += 1
                case FailSequence() | RefuseSequence():
                    raise RuntimeError(f"the core commanded {command}")
        for _ in range(ended):
            self._submit()

    def _start(self, target: CountingTarget) -> None:
        answer = target.answer(target.steps[0], self._now)
        due = self._now + answer.seconds + self._latency
        heapq.heappush(self._due, (due, answer.step_id, target, answer))


def _mixed(number: int, salt: int) -> int:
    """Pseudorandom, the same in every run."""
    value = (number * 0x9E3779B97F4A7C15 + salt * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return (value ^ (value >> 31)) * 0x94D049BB133111EB % 2**64 >> 24


def measure(load: Load, pace: Pace = _PACE, latency: float = _LATENCY_SECONDS) -> CoreSpeed:
    """Runs the load; the same load makes the same decisions. `latency` are the seconds between the end of a step and
    its answer. Raises RuntimeError where the core fails a sequence."""
    run = _Run(load, pace, latency)
    run.warm_up()
    return run.measure()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Load()
    for name, value in asdict(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    load = Load(**vars(parser.parse_args()))
    # As every process with a scheduler does.
    keep_loaded_objects()
    print(json.dumps({"load": asdict(load), **asdict(measure(load))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
