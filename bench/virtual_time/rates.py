"""Tokens per virtual second of a cell with known costs: the oracle for what AUTO decides.

Workers here only count: whether the target takes a draft token is fixed by sequence and position, so that every
policy meets the same luck. A draft of a poorer model gives some tokens away as wrong. Where the target takes another
token, that is the draft's second choice, its third and so on, as often as `ranks` says. A draft that prepares for
outcomes takes the likeliest of them by the same shares.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.virtual_time.luck import AcceptanceOf, Luck, evenly
from scheduler.config import Policy, SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.messages import (
    EmitTokens,
    Event,
    FailSequence,
    FinishSequence,
    Outcome,
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
from scheduler.statistics import Snapshot

_ENDLESS = 90_000
_PROMPT_LENGTHS = (5, 30, 12, 60)
_RIGHT, _WRONG = 7, 8


@dataclass(frozen=True)
class Costs:
    """Seconds of steps: a target's base + row · packed rows, a draft's passes · (draft_base + draft_row · rows)."""

    base: float
    row: float
    draft_base: float
    draft_row: float
    latency: float = 0.0005
    jitter: float = 0.05
    """Relative spread of step times."""
    slow_share: float = 0.0
    """Of the steps, that take twenty times as long."""
    row_alone: float | None = None
    """A target's seconds a packed row when it computes on the draft's cores too. None: they share none."""


FLAT = Costs(base=0.005, row=0.00002, draft_base=0.0008, draft_row=0.000005)
"""Like a GPU: rows are nearly free."""
STEEP = Costs(base=0.004, row=0.0025, draft_base=0.0008, draft_row=0.0001)
"""Every verified row costs: drafting pays for few rows that are nearly always right."""
CPU = Costs(base=0.015, row=0.0007, draft_base=0.003, draft_row=0.0002)
"""As measured on two cores with a model of 135 million parameters and a draft of a quarter of its layers."""
SHARED_CPU = Costs(base=0.0165, row=0.0008, draft_base=0.0025, draft_row=0.0002, row_alone=0.0004)
"""The same, where exclusive steps compute on both cores: less for a row, but reading weights takes as long."""
KERNELS = Costs(base=0.0075, row=0.0006, draft_base=0.0025, draft_row=0.0001, row_alone=0.00033)
"""Shared cores again, with kernels of our own for the linear layers and attention."""
SLOW_DRAFT = Costs(base=0.010, row=0.0002, draft_base=0.006, draft_row=0.0002)
"""A pass of the draft takes more than half of one of the target."""


@dataclass(frozen=True)
class Measured:
    """Committed tokens per virtual second: after the learning, and from the start."""

    rate: float
    rate_from_start: float
    snapshot: Snapshot
    disturbed_steps: int
    """Exclusive steps during which another worker computed."""
    other_steps: int
    """Steps that verify nothing: those of drafts."""
    verify_steps: int


class _Worker:
    def __init__(self, spec: WorkerSpec, quality: float) -> None:
        self.spec = spec
        self.quality = quality
        self.asked: Counter[int] = Counter()
        self.steps: deque[SendStep] = deque()
        self.passes: list[float] = []
        """When the passes end of a step that prepares, which may be cut short after each of them."""


class RateSimulation:
    """One core, its workers and the virtual clock."""

    def __init__(
        self,
        config: SchedulerConfig,
        costs: Costs,
        acceptance: AcceptanceOf,
        seed: int = 0,
        ranks: tuple[float, ...] = (),
    ) -> None:
        """`ranks`: of the tokens that are not the draft's first choice, the shares that are its second, its third, and
        so on."""
        self.core = SchedulerCore(config)
        self.costs = costs
        self.luck = Luck(acceptance, ranks)
        self._random = random.Random(seed)
        self._workers: dict[str, _Worker] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._submissions: dict[int, tuple[int, int | None, int | None]] = {}
        self._last_id = -1
        self.now = 0.0
        self.emitted_tokens = 0
        self.disturbed_steps = 0
        self.other_steps = 0
        self.verify_steps = 0

    def join(self, worker_id: str, role: Role, quality: float = 1.0) -> None:
        """A draft is of a model of its own, of whose tokens the share `quality` are not wrong from the start."""
        shares_cores = self.costs.row_alone is not None
        spec = WorkerSpec(worker_id, role, 16, 1_000_000, 100_000, 4096, shares_cores)
        self._workers[worker_id] = _Worker(spec, quality)
        self._handle(WorkerJoined(spec))

    def submit(
        self, sequence_id: int, prompt_length: int, draft_length: int | None, output_tokens: int | None = None
    ) -> None:
        """With `output_tokens` another sequence of the same kind comes for each that ends."""
        self._last_id = max(self._last_id, sequence_id)
        self._submissions[sequence_id] = prompt_length, draft_length, output_tokens
        most = _ENDLESS if output_tokens is None else output_tokens
        request = SequenceRequest(sequence_id, (1,) * prompt_length, most, draft_length=draft_length)
        self._handle(SequenceSubmitted(request))

    def asked(self, worker_id: str) -> Counter[int]:
        """How many proposals of which length a draft was asked for."""
        return self._workers[worker_id].asked

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            deadline = self.core.next_deadline()
            if deadline is not None and (not self._heap or deadline < self._heap[0][0]):
                self.now = deadline
                self._handle()
            else:
                self.now, _, action = heapq.heappop(self._heap)
                action()

    @property
    def rounds(self) -> int:
        return sum(self.core.snapshot().draft_lengths.values())

    def _at(self, time: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, action))

    def _handle(self, *events: Event) -> None:
        for command in self.core.handle(events, self.now):
            match command:
                case SendStep():
                    self.verify_steps += command.group is not None
                    self.other_steps += command.group is None
                    self._at(self.now + self.costs.latency, partial(self._arrive, command))
                case EmitTokens():
                    self.emitted_tokens += len(command.tokens)
                case FinishSequence():
                    # An event of its own, so that the other commands are carried out before those that follow from it.
                    again = self._submissions.pop(command.sequence_id)
                    self._at(self.now, partial(self._submit_next, *again))
                case FailSequence() | RefuseSequence():
                    raise AssertionError(command)

    def _submit_next(self, prompt_length: int, draft_length: int | None, output_tokens: int | None) -> None:
        self.submit(self._last_id + 1, prompt_length, draft_length, output_tokens)

    def _arrive(self, step: SendStep) -> None:
        worker = self._workers[step.worker_id]
        worker.steps.append(step)
        if len(worker.steps) == 1:
            self._start(worker)

    def _start(self, worker: _Worker) -> None:
        step = worker.steps[0]
        self._check_alone(worker, step)
        if any(row.outcomes for row in step.rows):
            costs, length = self.costs, max(row.draft_length for row in step.rows)
            first = sum(len(row.tokens) + len(row.draft_tokens) for row in step.rows)
            later = sum(row.outcomes for row in step.rows)
            worker.passes = [
                self.now + costs.draft_base * (done + 1) + costs.draft_row * (first + later * done)
                for done in range(length + 1)
            ]
            self._at(worker.passes[0], partial(self._end_pass, worker, self.now, 1))
            return
        seconds = self._seconds(worker, step)
        self._at(self.now + seconds, lambda: self._finish(worker, seconds))

    def _end_pass(self, worker: _Worker, began: float, done: int) -> None:
        """Of a step that prepares: it ends here if another one waits."""
        if done == len(worker.passes) or len(worker.steps) > 1:
            self._finish(worker, self.now - began, done - 1)
        else:
            self._at(worker.passes[done], partial(self._end_pass, worker, began, done + 1))

    def _check_alone(self, worker: _Worker, step: SendStep) -> None:
        """A change of plan may find a step of the other worker still running; otherwise exclusive steps run alone."""
        others = [other.steps[0] for other in self._workers.values() if other is not worker and other.steps]
        if step.rows and any(other.rows and (step.exclusive or other.exclusive) for other in others):
            self.disturbed_steps += 1

    def _seconds(self, worker: _Worker, step: SendStep) -> float:
        if not step.rows:
            return 0.0
        costs = self.costs
        if worker.spec.role is Role.TARGET:
            per_row = costs.row_alone if step.exclusive and costs.row_alone is not None else costs.row
            seconds = costs.base + per_row * sum(len(row.tokens) + len(row.draft_tokens) for row in step.rows)
        else:
            passes = max(1, *(row.draft_length for row in step.rows))
            later = sum(max(0, row.draft_length - 1) for row in step.rows)
            seconds = costs.draft_base * passes + costs.draft_row * (sum(len(row.tokens) for row in step.rows) + later)
        slow = 20.0 if self._random.random() < costs.slow_share else 1.0
        return seconds * slow * self._random.uniform(1 - costs.jitter, 1 + costs.jitter)

    def _finish(self, worker: _Worker, seconds: float, prepared: int = 0) -> None:
        step = worker.steps.popleft()
        results = tuple(
            self._prepared(row, min(prepared, row.draft_length)) if row.outcomes else self._answer(worker, row)
            for row in step.rows
        )
        event = StepCompleted(step.worker_id, step.step_id, results, seconds)
        self._at(self.now + self.costs.latency, lambda: self._handle(event))
        if worker.steps:
            self._start(worker)

    def _answer(self, worker: _Worker, row: Row) -> RowResult:
        fed = row.kv_len + len(row.tokens)
        if worker.spec.role is Role.DRAFT:
            worker.asked[row.draft_length] += row.draft_length > 0
            ahead, places = max(0, row.draft_length - 1), range(fed, fed + row.draft_length)
            proposal = tuple(_RIGHT if evenly(-row.sequence_id, at) < worker.quality else _WRONG for at in places)
            return RowResult(row.sequence_id, RowStatus.OK, fed + ahead, 0, proposal)
        accepted = 0
        for place, token in enumerate(row.draft_tokens):
            at = fed + place
            if token != _RIGHT or not self.luck.is_first(row.sequence_id, at):
                break
            accepted += 1
        tokens = (_RIGHT,) * (accepted + 1) if row.sample else ()
        return RowResult(row.sequence_id, RowStatus.OK, fed + accepted, 0, tokens, accepted)

    def _prepared(self, row: Row, length: int) -> RowResult:
        """Proposals of so many tokens for the likeliest outcomes. What the target will take is `_RIGHT`, here too."""
        fed, count = row.kv_len + len(row.tokens), len(row.draft_tokens)
        result = RowResult(row.sequence_id, RowStatus.OK, fed + count, 0)
        if length:
            likeliest = self.luck.likeliest(row.sequence_id, fed, count, row.outcomes)
            result.outcomes = tuple(
                Outcome(accepted, _RIGHT if taken else _WRONG + rank, (_RIGHT,) * length)
                for accepted, rank, taken in likeliest
            )
        return result


def rate_of(
    costs: Costs,
    acceptance: AcceptanceOf,
    *,
    policy: Policy,
    draft_length: int,
    batch_size: int,
    sequences: int,
    requested: int | None = None,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    tokens_each: int = 300,
    learning: int = 60,
    targets: int = 1,
    drafts: int = 1,
    seed: int = 0,
    draft_ahead: int = 0,
    ranks: tuple[float, ...] = (),
) -> Measured:
    """Runs until there are `tokens_each` for every one of the first sequences on average.

    None ends, or each after `output_tokens`, and then another one comes.

    The learning is the first `learning` tokens of that. `requested` is the draft length that the requests ask for.
    """
    window = max(sequences, batch_size)
    config = SchedulerConfig(
        batch_size=batch_size, max_running=window, policy=policy, draft_length=draft_length, draft_ahead=draft_ahead
    )
    simulation = RateSimulation(config, costs, acceptance, seed, ranks)
    for index in range(targets):
        simulation.join(f"target{index}", Role.TARGET)
    for index in range(drafts):
        simulation.join(f"draft{index}", Role.DRAFT)
    for sequence_id in range(sequences):
        usual = _PROMPT_LENGTHS[sequence_id % len(_PROMPT_LENGTHS)]
        simulation.submit(sequence_id, usual if prompt_tokens is None else prompt_tokens, requested, output_tokens)
    simulation.run(lambda: simulation.emitted_tokens >= sequences * learning)
    learnt_at, learnt_tokens = simulation.now, simulation.emitted_tokens
    simulation.run(lambda: simulation.emitted_tokens >= sequences * tokens_each)
    return Measured(
        (simulation.emitted_tokens - learnt_tokens) / (simulation.now - learnt_at),
        simulation.emitted_tokens / simulation.now,
        simulation.core.snapshot(),
        simulation.disturbed_steps,
        simulation.other_steps,
        simulation.verify_steps,
    )
