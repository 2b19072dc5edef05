"""A scheduler core whose commands are checked: what must hold of them, whatever the core's records say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spool.scheduler.core import SchedulerCore
from spool.scheduler.messages import (
    Command,
    DraftGrant,
    EmitTokens,
    Event,
    RefusalCause,
    RefuseSequence,
    Role,
    Row,
    SendStep,
    SequenceRequest,
    SequenceState,
    SequenceSubmitted,
    StepCompleted,
    WorkerDrained,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerSpec,
)
from tests.support.core_state import check_state

if TYPE_CHECKING:
    from tests.sim.cell.scheduler import SimulatedScheduler
    from tests.sim.cell.world import World

_MOST_SECONDS_WITHOUT_PROGRESS = 0.5
"""Of a healthy target that has sequences. A step takes 0.05 s at most, without waits."""

_MOST_WAIT_SECONDS = 0.25
"""Of steps that take 0.05 s at most: as long as a few of them."""

# What the core says of itself is compared every so many plans, since that visits all sequences.
_CHECK_EVERY = 13


class WatchedCore(SchedulerCore):
    """Checks each event and each plan."""

    def __init__(self, world: World, scheduler: SimulatedScheduler) -> None:
        super().__init__(world.plan.config)
        self._world, self._scheduler = world, scheduler
        self._plans = 0
        self._requests: dict[int, SequenceRequest] = {}
        self._lengths: dict[int, int] = {}
        self._workers: dict[str, WorkerSpec] = {}
        self._unanswered: Counter[str] = Counter()
        self._begun: set[int] = set()
        self._preemptions = 0
        self._draining: set[str] = set()
        self._drained: set[str] = set()
        self._events = 0
        self._absent: dict[str, int] = {}
        """Fingerprints that a target ever had, and the event at which none had it for the last time."""
        self._computed: dict[int, tuple[str, int]] = {}
        """Of each sequence that has output, the fingerprint of the target that sampled the last, and the event of that.
        """
        self._grants: dict[str, DraftGrant | None] = {}
        """Of the step that was sent last to each target."""
        self._progress: dict[str, float] = {}
        """When a healthy target last began to have sequences, or has answered rows."""

    def apply(self, event: Event, now: float) -> list[Command]:
        drafts = self._drafts()
        self._events += 1
        match event:
            case WorkerLost():
                lost = self._workers.pop(event.worker_id, None)
                if lost is not None and not self._world.may_lose_workers(lost.role):
                    self._fail(f"lost {event.worker_id} unprovoked: {event.reason}")
                self._draining.discard(event.worker_id)
                self._drained.discard(event.worker_id)
                if lost is not None:
                    self._note_absence(lost)
                self._grants.pop(event.worker_id, None)
                self._progress.pop(event.worker_id, None)
            case WorkerJoined():
                self._absent.setdefault(event.worker.fingerprint, self._events)
                self._workers[event.worker.worker_id] = event.worker
                self._unanswered[event.worker.worker_id] = 0
            case WorkerDraining():
                self._draining.add(event.worker_id)
            case StepCompleted() if event.worker_id in self._workers:
                self._unanswered[event.worker_id] -= 1
                if event.results and event.worker_id in self._progress:
                    self._progress[event.worker_id] = now
            case SequenceSubmitted():
                request = event.request
                self._requests[request.sequence_id] = request
                self._lengths[request.sequence_id] = len(request.prompt) + len(request.committed_output)
                self._computed[request.sequence_id] = request.fingerprint, self._events
                self._world.faults.poisons.submitted(request)
        with self._failing_on(type(event).__name__):
            commands = super().apply(event, now)
        if drafts != self._drafts():
            self._check_balance()
        for command in commands:
            if isinstance(command, EmitTokens):
                fingerprint = self._workers[command.target_id].fingerprint
                self._computed[command.sequence_id] = fingerprint, self._events
                self._lengths[command.sequence_id] += len(command.tokens)
        if isinstance(event, SequenceSubmitted):  # others that wait may be let in before it
            self._check_turns(event.request.sequence_id)
            if any(isinstance(one, RefuseSequence) and one.cause is RefusalCause.QUEUE_FULL for one in commands):
                self._check_full_queue(event.request.key)
        return commands

    def plan(self) -> list[Command]:
        with self._failing_on("planning"):
            commands = super().plan()
        for command in commands:
            if isinstance(command, SendStep):
                self._check_step(command)
                self._check_grant(command)
            elif isinstance(command, WorkerDrained):
                self._check_drained(command.worker_id)
                self._drained.add(command.worker_id)
                if command.worker_id in self._workers:
                    self._note_absence(self._workers[command.worker_id])
        self._check_turns()
        self._plans += 1
        if self._plans % _CHECK_EVERY == 0:
            with self._failing_on("counting what it has"):
                check_state(self)
            self._check_pages()
            self._check_keys()
        return commands

    def _fail(self, text: str) -> None:
        if self._scheduler.process.alive:
            self._world.fail(f"{self._scheduler.process.name} {text}")

    def _check_step(self, step: SendStep) -> None:
        config, spec = self._world.plan.config, self._workers[step.worker_id]
        self._unanswered[step.worker_id] += 1
        broken = {
            "may wait for a draft worker too long": step.wait_seconds > _MOST_WAIT_SECONDS
            and not self._world.faults.struck.keys() & {"worker slow", "worker stalls"},
            "has more tokens than the worker takes": spec.max_num_batched_tokens
            < sum((1 if row.follows else row.end - row.kv_len) + row.verify for row in step.rows),
            "verifies more than a batch": step.grouped > config.batch_size,
            "is one too many in flight": self._unanswered[step.worker_id] > config.steps_in_flight,
            "drafts beyond max_tokens": any(
                self._lengths[row.sequence_id] + _foreseen(row) >= len(request.prompt) + request.max_tokens
                for row in step.rows
                for request in [self._requests[row.sequence_id]]
                if row.sample and (row.verify or row.asks)
            ),
            "goes to a draft worker": spec.role is Role.DRAFT,
            "goes on with other bits": any(
                row.opening is not None and self._has_left_its_like(row.sequence_id, spec.fingerprint)
                for row in step.rows
            ),
            "has another row than that of a suspect": len(step.rows) > 1 and self.has_suspect(step.worker_id),
        }
        for rule, is_broken in broken.items():
            if is_broken:
                self._fail(f"sends {step.worker_id} step {step.step_id}, which {rule}")

    def _note_absence(self, gone: WorkerSpec) -> None:
        """Of a fingerprint, if no target has it any more that can take a sequence in."""
        there = {spec.fingerprint for name, spec in self._workers.items() if name not in self._drained}
        if gone.fingerprint not in there:
            self._absent[gone.fingerprint] = self._events

    def _has_left_its_like(self, sequence_id: int, fingerprint: str) -> bool:
        """Whether the sequence goes on at a target with this fingerprint, while there was one with its own all the time
        since its last token."""
        own, event = self._computed[sequence_id]
        return own not in ("", fingerprint) and self._absent.get(own, event) < event

    def _drafts(self) -> set[str]:
        """Draft workers that stay."""
        return {name for name, spec in self._workers.items() if spec.role is Role.DRAFT} - self._draining

    def _check_grant(self, step: SendStep) -> None:
        """A target that proposes nothing itself has a draft worker where there is one."""
        drafts = self._drafts()
        grant, before = step.grant, self._grants.get(step.worker_id)
        self._grants[step.worker_id] = grant
        what = f"sends {step.worker_id} step {step.step_id} with {grant}"
        if grant is None:
            if drafts and not self._workers[step.worker_id].own_draft_id:
                self._fail(f"{what}, drafts are {sorted(drafts)}")
        elif grant.draft_id not in drafts:
            self._fail(f"{what}, drafts are {sorted(drafts)}")
        elif before is not None and before != grant and before.number >= grant.number:
            self._fail(f"{what}, after {before}")

    def _check_drained(self, worker_id: str) -> None:
        """Nobody that has something to do uses the draft worker any more, unless it is gone."""
        if worker_id not in self._workers:
            return
        snapshot = self.snapshot()
        for target in snapshot.workers:
            grant = self._grants.get(target.worker_id)
            if target.steps_in_flight and grant is not None and grant.draft_id == worker_id:
                self._fail(f"lets {worker_id} go, which serves {target.worker_id}")

    def check_progress(self, now: float, healthy: Container[str]) -> None:
        """Of each healthy target that has something to do."""
        for target in self.snapshot().workers:
            name = target.worker_id
            if target.role is not Role.TARGET or not target.sequences or name not in healthy:
                self._progress.pop(name, None)
            elif name not in self._draining:
                since = self._progress.setdefault(name, now)
                if now - since > _MOST_SECONDS_WITHOUT_PROGRESS:
                    self._fail(f"has heard nothing from {name} for {now - since:.3f} s, and it has sequences")

    def _check_balance(self) -> None:
        """Of draft workers, once some have come or gone, as far as targets can be divided among them."""
        workers, able = self.snapshot().workers, self._drafts()
        drafts = [w.sequences for w in workers if w.worker_id in able]
        served = [w.sequences for w in workers if w.role is Role.TARGET]
        if len(drafts) > 1 and served:
            gap = max(drafts) - min(drafts)
            if max(drafts) > 2 * min(drafts) + len(served) and gap > max(served) + len(served):
                self._fail(f"has draft workers serve {drafts} sequences, targets have {served}")

    def _check_turns(self, newcomer: int | None = None) -> None:
        """Of sequences of one key, whoever has begun comes first by priority and age among those that have not. Those
        that wait after a preemption may have begun before it."""
        waiting: dict[str, tuple[int, int]] = {}
        begun = []
        preemptions = self.snapshot().preemptions if self._world.plan.config.keys else 0
        if preemptions > self._preemptions:
            self._preemptions = preemptions
            self._begun.update(self._requests)
        for one in self.sequences(len(self._requests)) if self._world.plan.config.keys else ():
            if one.sequence_id not in self._begun:
                request = self._requests[one.sequence_id]
                rank = (request.priority, one.sequence_id)
                if one.sequence_id == newcomer:
                    continue
                if one.state is SequenceState.WAITING and request.fingerprint:
                    continue  # for targets that are alike
                if one.state is SequenceState.WAITING:
                    waiting[request.key] = min(rank, waiting.get(request.key, rank))
                else:
                    begun.append((request.key, rank))
                    self._begun.add(one.sequence_id)
        for key, rank in begun:
            if waiting.get(key, rank) < rank:
                self._fail(f"begins sequence {rank[1]}, another of its key comes first")

    def _check_full_queue(self, name: str) -> None:
        """No key finds it filled by others."""
        if not any(key.waiting for key in self.snapshot().keys if key.name == name):
            self._fail(f"refuses a sequence of key {name!r} for a full queue, and none of that key waits")

    def _check_pages(self) -> None:
        """A target has pages reserved for the KV of those that have all but their last token's there."""
        needed = Counter[str]()
        for one in self.sequences(len(self._requests)):
            if one.target_id is not None and one.state in (SequenceState.IDLE, SequenceState.VERIFYING):
                spec = self._workers[one.target_id]
                layers = zip(spec.page_spans or (spec.page_size,), spec.page_windows or (0,), strict=True)
                # What a window has left behind may be free.
                needed[one.target_id] += sum(-(-(one.length - 1) // span) for span, window in layers if not window)
        for target in self.snapshot().workers:
            if needed[target.worker_id] > target.total_pages - target.free_pages:
                self._fail(f"has too few pages reserved on {target}, its sequences need {needed[target.worker_id]}")

    def _check_keys(self) -> None:
        limits = {key.name: key.max_running for key in self._world.plan.config.keys}
        for key in self.snapshot().keys if limits else ():
            limit = limits.get(key.name)
            if limit is not None and key.running > limit:
                self._fail(f"runs {key.running} sequences of key {key.name}, the limit is {limit}")

    @contextmanager
    def _failing_on(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._fail(f"failed on {what}: {error!r}")
            raise


def _foreseen(row: Row) -> int:
    """Tokens behind the committed ones where all that the row verifies, or has proposed, is right."""
    return max(row.follows + row.verify, 1 + row.asks if row.asks else 0)
