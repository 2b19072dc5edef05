"""The scheduler's real core over workers that only count, in virtual time.

Whether the target takes a draft token is fixed by sequence and position, so that every policy meets the same luck. A
draft of a poorer model gives some tokens away as wrong. Where the target takes another token, that is the draft's
second choice, its third and so on, as often as `ranks` says. A draft that prepares for outcomes takes the likeliest of
them by the same shares.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from bench.virtual_time.luck import AcceptanceOf, Luck, evenly
from scheduler.config import SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.messages import (
    Command,
    Event,
    KvMoved,
    MoveKv,
    Outcome,
    Role,
    Row,
    RowResult,
    RowStatus,
    SendStep,
    StepCompleted,
    WorkerJoined,
    WorkerSpec,
)
from scheduler.state.digests import DigestedTokens

PAGE_SIZE = 16
_RIGHT, _WRONG = 7, 8


@dataclass(frozen=True)
class Costs:
    """Seconds of steps: a target's base + row · packed tokens + kv · tokens of KV that it reads; a draft's pass alike,
    by the other three. Tokens of a pass are rounded up to whole blocks."""

    base: float
    row: float
    draft_base: float
    draft_row: float
    latency: float = 0.0005
    """Each way between the scheduler and a worker."""
    jitter: float = 0.05
    """Relative spread of step times."""
    slow_share: float = 0.0
    """Of the steps, that take twenty times as long."""
    row_alone: float | None = None
    """A target's seconds a packed row when it computes on the draft's cores too. None: they share none."""
    kv: float = 0.0
    draft_kv: float = 0.0
    scheduler_step: float = 0.0
    """The scheduler's own time for a step, sent and answered. It does one thing after the other."""
    scheduler_row: float = 0.0
    """And for each row of it."""
    block: int = 1
    draft_block: int = 1
    move: float = 0.005
    """A move of KV between targets, by itself; it takes no time of theirs."""
    move_kv: float = 0.00005
    """And for each token of KV, as over the loopback of one machine with 23 KB of KV a token."""


def whole_blocks(tokens: int, block: int) -> int:
    """So many tokens, rounded up to blocks."""
    return -(-tokens // block) * block


def pass_tokens(fed: int, draft_lengths: Sequence[int]) -> list[int]:
    """Tokens of each pass of a draft's step: first those that all rows feed, then one of each row that goes on."""
    later = range(1, max(1, *draft_lengths))
    return [fed, *(sum(length > done for length in draft_lengths) for done in later)]


class PrefixCache:
    """Which pages a worker has KV of, by the digest of all tokens up to their end; the longest unused go first."""

    def __init__(self, pages: int) -> None:
        self._capacity = pages
        self._known: OrderedDict[int, None] = OrderedDict()

    def found(self, pages: Sequence[int]) -> int:
        """How many of the first of these pages are known."""
        for place, page in enumerate(pages):
            if page not in self._known:
                return place
            self._known.move_to_end(page)
        return len(pages)

    def add(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._known[page] = None
            self._known.move_to_end(page)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)


@dataclass
class Prompt:
    """Of a sequence on a worker: the digests of its prompt's pages, how many of its tokens had KV there before it came,
    and how many of its pages are known to the cache."""

    digests: list[int]
    held: int
    cached: int


class Worker:
    """A worker and the steps that it has yet to answer."""

    def __init__(self, spec: WorkerSpec, quality: float) -> None:
        self.spec = spec
        self.quality = quality
        self.asked: Counter[int] = Counter()
        """Proposals by the length that was asked for."""
        self.steps: deque[SendStep] = deque()
        self.passes: list[float] = []
        """When the passes end of a step that prepares, which may be cut short after each of them."""
        self.busy_seconds = 0.0
        self.cache = PrefixCache(spec.total_pages)
        self.prompts: dict[int, Prompt] = {}


class VirtualCell:
    """One core, its workers and the virtual clock. Whoever inherits says what becomes of the core's other commands."""

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
        self.workers: dict[str, Worker] = {}
        self.now = 0.0
        self.disturbed_steps = 0
        self.other_steps = 0
        self.verify_steps = 0
        self._random = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._inbox: list[Event] = []
        self._scheduler_works = False

    def delivered(self, command: Command) -> None:
        """A command that is not for a worker."""
        raise NotImplementedError

    def join(self, worker_id: str, role: Role, quality: float = 1.0, pages: int = 1_000_000, model: str = "") -> None:
        """A draft is of a model of its own, of whose tokens the share `quality` are not wrong from the start."""
        spec = WorkerSpec(worker_id, role, PAGE_SIZE, pages, pages * PAGE_SIZE, 4096, model)
        self.workers[worker_id] = Worker(spec, quality)
        self.tell(WorkerJoined(spec))

    def run(self, until: Callable[[], bool]) -> None:
        """Until that holds. Raises RuntimeError where nothing is left to happen."""
        while not until():
            deadline = None if self._scheduler_works else self.core.next_deadline()
            if deadline is not None and (not self._heap or deadline < self._heap[0][0]):
                self.now = deadline
                self.tell()
            elif self._heap:
                self.now, _, action = heapq.heappop(self._heap)
                action()
            else:
                raise RuntimeError(f"nothing is left to happen after {self.now:.3f} virtual seconds")

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, action))

    def tell(self, *events: Event) -> None:
        """What the scheduler learns. While it works, events pile up, and it takes them all at once."""
        self._inbox += events
        if not self._scheduler_works:
            self._schedule()

    def _schedule(self) -> None:
        events, self._inbox = self._inbox, []
        commands = self.core.handle(events, self.now)
        seconds = sum(self._scheduler_seconds(command) for command in commands)
        if seconds:
            self._scheduler_works = True
            self.at(self.now + seconds, partial(self._scheduled, commands))
        else:
            self._carry_out(commands)

    def _scheduled(self, commands: Sequence[Command]) -> None:
        self._scheduler_works = False
        self._carry_out(commands)
        if self._inbox:
            self._schedule()

    def _scheduler_seconds(self, command: Command) -> float:
        if not isinstance(command, SendStep):
            return 0.0
        return self.costs.scheduler_step + self.costs.scheduler_row * len(command.rows)

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, SendStep):
                self.verify_steps += command.group is not None
                self.other_steps += command.group is None
                self.at(self.now + self.costs.latency, partial(self._arrive, command))
            elif isinstance(command, MoveKv):
                seconds = self.costs.move + self.costs.move_kv * len(command.tokens)
                moved = KvMoved(command.move_id, True, seconds)
                self.at(self.now + seconds + 2 * self.costs.latency, partial(self.tell, moved))
            else:
                self.delivered(command)

    # --- workers ------------------------------------------------------------------------------------------------------

    def _arrive(self, step: SendStep) -> None:
        worker = self.workers[step.worker_id]
        worker.steps.append(step)
        if len(worker.steps) == 1:
            self._start(worker)

    def _start(self, worker: Worker) -> None:
        step = worker.steps[0]
        self._check_alone(worker, step)
        for sequence_id in step.released:
            worker.prompts.pop(sequence_id, None)
        if any(row.outcomes for row in step.rows):
            costs, length = self.costs, max(row.draft_length for row in step.rows)
            first = whole_blocks(sum(len(row.tokens) + len(row.draft_tokens) for row in step.rows), costs.draft_block)
            later = whole_blocks(sum(row.outcomes for row in step.rows), costs.draft_block)
            reading = costs.draft_kv * sum(row.kv_len for row in step.rows)
            worker.passes = [
                self.now + (costs.draft_base + reading) * (done + 1) + costs.draft_row * (first + later * done)
                for done in range(length + 1)
            ]
            self.at(worker.passes[0], partial(self._end_pass, worker, self.now, 1))
            return
        for row in step.rows:
            self._look_up(worker, row)
        seconds = self._seconds(worker, step)
        self.at(self.now + seconds, lambda: self._finish(worker, seconds))

    def _end_pass(self, worker: Worker, began: float, done: int) -> None:
        """Of a step that prepares: it ends here if another one waits."""
        if done == len(worker.passes) or len(worker.steps) > 1:
            self._finish(worker, self.now - began, done - 1)
        else:
            self.at(worker.passes[done], partial(self._end_pass, worker, began, done + 1))

    def _check_alone(self, worker: Worker, step: SendStep) -> None:
        """A change of plan may find a step of the other worker still running; otherwise exclusive steps run alone."""
        others = [other.steps[0] for other in self.workers.values() if other is not worker and other.steps]
        if step.rows and any(other.rows and False for other in others):
            self.disturbed_steps += 1

    def _seconds(self, worker: Worker, step: SendStep) -> float:
        costs = self.costs
        fed = sum(self._fed(worker, row) for row in step.rows)
        if not fed:
            return 0.0
        reading = sum(row.kv_len for row in step.rows)
        if worker.spec.role is Role.TARGET:
            per_row = costs.row
            fed += sum(len(row.draft_tokens) for row in step.rows)
            seconds = costs.base + per_row * whole_blocks(fed, costs.block) + costs.kv * reading
        else:
            passes = pass_tokens(fed, [row.draft_length for row in step.rows])
            tokens = sum(whole_blocks(one, costs.draft_block) for one in passes)
            seconds = (costs.draft_base + costs.draft_kv * reading) * len(passes) + costs.draft_row * tokens
        slow = 20.0 if self._random.random() < costs.slow_share else 1.0
        return seconds * slow * self._random.uniform(1 - costs.jitter, 1 + costs.jitter)

    def _look_up(self, worker: Worker, row: Row) -> None:
        """What the cache has of the prompt of a sequence that comes to the worker."""
        if row.opening is not None and not row.kv_len:
            prompt = DigestedTokens(row.opening.prompt)
            pages = [prompt.digest(end) for end in range(PAGE_SIZE, len(prompt) + 1, PAGE_SIZE)]
            # At least one token is fed, for its logits.
            known = worker.cache.found(pages[: (len(prompt) - 1) // PAGE_SIZE])
            worker.prompts[row.sequence_id] = Prompt(pages, known * PAGE_SIZE, known)

    def _fed(self, worker: Worker, row: Row) -> int:
        """The tokens of a row that are to be computed: not those of which the worker has KV from other sequences."""
        prompt = worker.prompts.get(row.sequence_id)
        held = prompt.held if prompt is not None else 0
        return min(len(row.tokens), max(0, row.kv_len + len(row.tokens) - held))

    def _finish(self, worker: Worker, seconds: float, prepared: int = 0) -> None:
        step = worker.steps.popleft()
        worker.busy_seconds += seconds
        results = tuple(
            self._prepared(row, min(prepared, row.draft_length)) if row.outcomes else self._answer(worker, row)
            for row in step.rows
        )
        event = StepCompleted(step.worker_id, step.step_id, results, seconds)
        self.at(self.now + self.costs.latency, lambda: self.tell(event))
        if worker.steps:
            self._start(worker)

    def _answer(self, worker: Worker, row: Row) -> RowResult:
        fed = row.kv_len + len(row.tokens)
        prompt = worker.prompts.get(row.sequence_id)
        if prompt is not None and prompt.cached < len(prompt.digests):
            computed = fed // PAGE_SIZE
            worker.cache.add(prompt.digests[prompt.cached : computed])
            prompt.cached = max(prompt.cached, computed)
        if worker.spec.role is Role.DRAFT and row.draft_length:
            worker.asked[row.draft_length] += 1
            ahead, places = row.draft_length - 1, range(fed, fed + row.draft_length)
            proposal = tuple(_RIGHT if evenly(-row.sequence_id, at) < worker.quality else _WRONG for at in places)
            return RowResult(row.sequence_id, RowStatus.OK, fed + ahead, 0, proposal)
        accepted = 0
        for place, token in enumerate(row.draft_tokens):
            at = fed + place
            if token != _RIGHT or not self.luck.is_first(row.sequence_id, at):
                break
            accepted += 1
        tokens = (_RIGHT,) * (accepted + 1) if row.sample else ()
        result = RowResult(row.sequence_id, RowStatus.OK, fed + accepted, 0, tokens, accepted)
        if prompt is not None and prompt.held > row.kv_len:
            result.reused = prompt.held - row.kv_len if row.opening is not None else 0
            if prompt.held > fed:
                result.kv_len, result.prefix_digest = prompt.held, prompt.digests[prompt.held // PAGE_SIZE - 1]
        return result

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
