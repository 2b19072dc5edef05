"""What the core knows of one worker: its KV and pages, the steps it owes an answer for, the work that waits for it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import dataclass
from typing import Generic, TypeVar

from scheduler.draft_plan import DraftPlan
from scheduler.drafted import CountByLength, DraftedIndex
from scheduler.ledger import KvEntry, PageBook
from scheduler.messages import GroupFormed, Row, SendStep, SequenceRequest, WorkerSpec
from scheduler.plan_record import PlanRecord
from scheduler.sequence import Sequence
from scheduler.step_times import DraftTimes, RecentMedian, TargetTimes

_FIRST_PLAIN_STEP = 12

STEADY_LACK = 2
"""Committed tokens a draft lacks at most between rounds: its own last proposal and the bonus token."""


@dataclass(slots=True, eq=False)
class InFlightRow:
    """A row on its way. `abandoned` once its sequence left the worker: the answer then means nothing."""

    sequence: Sequence
    row: Row
    abandoned: bool = False


@dataclass(slots=True)
class TargetWork:
    """Packed rows of a target step: those to verify, whether of one length, and those of prefill."""

    verify_rows: int = 0
    equal_length: bool = True
    prefill_rows: int = 0

    @property
    def any(self) -> bool:
        return self.verify_rows > 0 or self.prefill_rows > 0

    def leave_out(self, rows: int) -> None:
        """So many rows of prefill needed no work."""
        self.prefill_rows = max(0, self.prefill_rows - rows)


@dataclass(slots=True)
class DraftWork:
    """What a draft step does: passes, rows times their passes, and rows that catch up."""

    passes: int = 1
    row_passes: int = 0
    catch_up_rows: int = 0

    @property
    def any(self) -> bool:
        return self.row_passes > 0 or self.catch_up_rows > 0

    def leave_out(self, rows: int) -> None:
        """So many rows that were to catch up needed no work."""
        self.catch_up_rows = max(0, self.catch_up_rows - rows)

    def add(self, fed: int, draft_length: int) -> None:
        if draft_length:
            if draft_length > self.passes:
                self.passes = draft_length
            self.row_passes += draft_length
            self.catch_up_rows += fed - 1
        else:
            self.catch_up_rows += fed


Work = TypeVar("Work", TargetWork, DraftWork)


@dataclass(slots=True, eq=False)
class OutstandingStep(Generic[Work]):
    """A step sent and not answered; `to_idle_worker` when nothing was before it, `alone` as in `SendStep`."""

    rows: list[InFlightRow]
    work: Work
    group: GroupFormed | None
    sent_at: float
    to_idle_worker: bool
    alone: bool


class WorkerBook(ABC, Generic[Work]):
    """Books of one worker. `sequences` are those that have their home here."""

    def __init__(self, spec: WorkerSpec, prefill_chunk: int, steps_in_flight: int) -> None:
        self.spec = spec
        self.worker_id = spec.worker_id
        self.chunk = min(prefill_chunk, spec.max_packed_rows)
        self.pages = PageBook(spec.total_pages, spec.page_size)
        self.kv: dict[int, KvEntry] = {}
        self.sequences: dict[int, Sequence] = {}
        self.in_flight: dict[int, InFlightRow] = {}
        self.outstanding: dict[int, OutstandingStep[Work]] = {}
        self.releases: dict[int, None] = {}
        self.running_since = 0.0
        self.overhead = RecentMedian(0.0)
        """Seconds from sending a step to an idle worker to its answer, beyond those of the step itself."""
        self.turns = False
        """Whether target and draft take turns, each computing alone on the cores of both."""
        self.draining = False
        """Whether it gets no new sequences, since it is to go."""
        self._steps_in_flight = steps_in_flight

    @property
    @abstractmethod
    def times(self) -> TargetTimes | DraftTimes:
        """What steps take the way they are run now."""

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that fits when it is alone."""
        return min(self.spec.max_sequence_length, self.spec.total_pages * self.spec.page_size)

    @property
    def can_take_step(self) -> bool:
        return len(self.outstanding) < self._steps_in_flight

    @property
    def busy(self) -> bool:
        """Whether it has rows to work on; a step that only releases takes no time."""
        return bool(self.in_flight)

    def has_room(self, positions: int) -> bool:
        pages = self.pages
        return positions <= self.capacity and pages.pages_for(positions) + self._spare() <= pages.free_pages

    def _spare(self) -> int:
        """Pages kept back from newcomers, for those here to grow into."""
        return -(-len(self.sequences) // 4)

    def house(self, sequence: Sequence, positions: int) -> None:
        """Gives the sequence a home here; `has_room` said yes."""
        if not self.pages.reserve(sequence.sequence_id, positions):
            raise RuntimeError(f"no pages for sequence {sequence.sequence_id} on worker {self.worker_id}")
        self.sequences[sequence.sequence_id] = sequence
        self.kv[sequence.sequence_id] = KvEntry()

    def evict(self, sequence: Sequence) -> None:
        """Takes the sequence's home away; what the worker holds of it is released with the next step."""
        sequence_id = sequence.sequence_id
        del self.sequences[sequence_id]
        self.pages.release(sequence_id)
        if self.kv.pop(sequence_id).opened:
            self.releases[sequence_id] = None
        flight = self.in_flight.get(sequence_id)
        if flight is not None:
            flight.abandoned = True

    def has_younger(self, sequence: Sequence) -> bool:
        return any(other.order > sequence.order for other in self.sequences.values())

    def youngest_idle(self, younger_than: int, besides: Container[int]) -> Sequence | None:
        """The youngest sequence here that arrived after `younger_than` and has no row in flight or in `besides`."""
        youngest = None
        for sequence_id, sequence in self.sequences.items():
            if sequence.order > younger_than and sequence_id not in self.in_flight and sequence_id not in besides:
                younger_than, youngest = sequence.order, sequence
        return youngest

    def make_row(
        self,
        sequence: Sequence,
        end: int,
        draft_tokens: tuple[int, ...] = (),
        draft_length: int = 0,
        choose: bool = False,
    ) -> Row:
        """A row, to be sent, that feeds committed tokens up to position `end`, which must leave one to feed."""
        sequence_id, tokens = sequence.sequence_id, sequence.tokens
        entry = self.kv[sequence_id]
        start = entry.valid if entry.valid < end else end - 1
        opening: SequenceRequest | None = None
        committed: tuple[int, ...] = ()
        if not entry.opened:
            entry.opened = True
            opening = sequence.request
            committed = tuple(tokens.tokens[: self.pages.reserved(sequence_id) * self.spec.page_size])
        return Row(
            sequence_id,
            start,
            tokens.digest(start),
            tuple(tokens.tokens[start:end]),
            draft_tokens,
            draft_length,
            choose,
            opening,
            committed,
        )

    def send(
        self, step_id: int, rows: dict[int, InFlightRow], work: Work, now: float, group: GroupFormed | None = None
    ) -> SendStep:
        """Books a step with these rows and all pending releases, and returns the command for it."""
        released = tuple(self.releases)
        self.releases.clear()
        self.in_flight.update(rows)
        idle = not self.outstanding
        if idle:
            self.running_since = now
        flights = list(rows.values())
        self.outstanding[step_id] = OutstandingStep(flights, work, group, now, idle, self.turns)
        return SendStep(self.worker_id, step_id, tuple([flight.row for flight in flights]), released, group, self.turns)

    def release(self, step_id: int, now: float) -> SendStep:
        """A step that only carries the pending releases."""
        return self.send(step_id, {}, self._no_work(), now)

    @abstractmethod
    def _no_work(self) -> Work: ...

    def take_answered(self, step_id: int, now: float) -> OutstandingStep[Work] | None:
        """The step that was answered, out of the books; its rows stay in flight until each was looked at."""
        step = self.outstanding.pop(step_id, None)
        if step is not None:
            self.running_since = now
        return step

    def note_overhead(self, step: OutstandingStep[Work], seconds: float, now: float) -> None:
        if step.to_idle_worker and step.rows and math.isfinite(seconds):
            self.overhead.observe(max(0.0, now - step.sent_at - max(0.0, seconds)))

    def check_integrity(self) -> None:
        """Raises RuntimeError when the books of this worker disagree."""
        self.pages.check_integrity()
        if not self.sequences.keys() == self.kv.keys():
            raise RuntimeError(f"worker {self.worker_id}: sequences and KV ledger differ")
        on_the_way = [flight.row.sequence_id for step in self.outstanding.values() for flight in step.rows]
        if len(on_the_way) != len(set(on_the_way)) or set(on_the_way) != set(self.in_flight):
            raise RuntimeError(f"worker {self.worker_id}: rows in flight and outstanding steps differ")
        for sequence_id, entry in self.kv.items():
            held = entry.valid + entry.ahead
            if self.pages.reserved(sequence_id) < self.pages.pages_for(held):
                raise RuntimeError(
                    f"worker {self.worker_id}: sequence {sequence_id} holds {held} positions, too few pages"
                )
        for flight in self.in_flight.values():
            if not flight.abandoned and flight.row.sequence_id not in self.sequences:
                raise RuntimeError(f"worker {self.worker_id}: a row is in flight for a sequence that left")


class DraftBook(WorkerBook[DraftWork]):
    """A draft worker: what is ready to be proposed for, and whose KV lags behind its committed tokens."""

    def __init__(self, spec: WorkerSpec, prefill_chunk: int, steps_in_flight: int, initial_seconds: float) -> None:
        super().__init__(spec, prefill_chunk, steps_in_flight)
        self.ready: dict[int, Sequence] = {}
        self.lagging: dict[int, Sequence] = {}
        self.most_lack = min(max(self.chunk, STEADY_LACK), spec.max_packed_rows)
        """Committed tokens that one step can feed and propose after."""
        self.verifying = 0
        """Sequences at home here that a target is verifying: they may come back any moment."""
        self.times_alone = DraftTimes(initial_seconds)
        self.times_beside = DraftTimes(initial_seconds, self.times_alone) if spec.shares_cores else self.times_alone
        self.waiting_since: float | None = None
        self.waiting_until: float | None = None
        """Set while it is idle for the sake of sequences that are about to come back from a target."""

    @property
    def times(self) -> DraftTimes:
        return self.times_alone if self.turns else self.times_beside

    def observe(self, step: OutstandingStep[DraftWork], seconds: float) -> None:
        """Learns from what an answered step took."""
        work = step.work
        if work.any:
            self._times_of(step).observe(work.passes, work.row_passes, work.catch_up_rows, seconds)

    def expected_seconds(self, step: OutstandingStep[DraftWork]) -> float:
        work = step.work
        return self._times_of(step).predict(work.passes, work.row_passes, work.catch_up_rows)

    def _times_of(self, step: OutstandingStep[DraftWork]) -> DraftTimes:
        return self.times_alone if step.alone else self.times_beside

    def _no_work(self) -> DraftWork:
        return DraftWork()

    def lack(self, sequence: Sequence) -> int:
        """Committed tokens whose KV is missing; at least 1, since proposing takes the logits of the last one."""
        missing = sequence.length - self.kv[sequence.sequence_id].valid
        return missing if missing > 1 else 1

    def note_lack(self, sequence: Sequence) -> int:
        """Files the sequence by whether it must catch up; to be called when its length, KV or wish has changed.

        Returns its lack.
        """
        missing = sequence.length - self.kv[sequence.sequence_id].valid
        if missing > STEADY_LACK and sequence.wished_length:
            self.lagging.setdefault(sequence.sequence_id, sequence)
        elif self.lagging:
            self.lagging.pop(sequence.sequence_id, None)
        return missing if missing > 1 else 1

    def house(self, sequence: Sequence, positions: int) -> None:
        super().house(sequence, positions)
        self.note_lack(sequence)

    def evict(self, sequence: Sequence) -> None:
        super().evict(sequence)
        self.lagging.pop(sequence.sequence_id, None)

    def expected_end(self, step: OutstandingStep[DraftWork]) -> float:
        """When the answer to the step that runs is expected."""
        return self.running_since + self.expected_seconds(step) + self.overhead.value

    def stop_waiting(self) -> None:
        self.waiting_since = self.waiting_until = None

    def check_integrity(self) -> None:
        super().check_integrity()
        for sequence_id, sequence in self.sequences.items():
            lags = sequence.wished_length > 0 and self.lack(sequence) > STEADY_LACK
            if lags != (sequence_id in self.lagging):
                raise RuntimeError(f"draft worker {self.worker_id}: sequence {sequence_id} is filed wrongly")
        if not (self.ready.keys() <= self.sequences.keys() and self.lagging.keys() <= self.sequences.keys()):
            raise RuntimeError(f"draft worker {self.worker_id}: work is filed for sequences that left")


class TargetBook(WorkerBook[TargetWork]):
    """A target worker: what it must prefill, what it can verify, and what is on its way to that."""

    def __init__(
        self, spec: WorkerSpec, prefill_chunk: int, steps_in_flight: int, initial_seconds: float, batch_size: int
    ) -> None:
        super().__init__(spec, prefill_chunk, steps_in_flight)
        self.longest_draft = max(0, spec.max_packed_rows // 2 - 1)
        """Draft tokens of a row at most, so that two rows always fit a step and prefill cannot be shut out."""
        self.prefilling: dict[int, Sequence] = {}
        self.drafted = DraftedIndex(batch_size)
        self.coming = CountByLength()
        """READY and DRAFTING sequences."""
        self.verifying = 0
        self.times_alone = TargetTimes(initial_seconds)
        self.times_beside = TargetTimes(initial_seconds, self.times_alone) if spec.shares_cores else self.times_alone
        self.verify_steps = 0
        self.plan: DraftPlan | None = None
        """How its sequences draft and group under AUTO; None while that is being tried out."""
        self.plain_step = False
        self.plain_step_due = _FIRST_PLAIN_STEP
        """Counted in verify steps: when the rounds that begin are plain for the sake of learning what that costs."""
        self.record = PlanRecord()
        self.planned_for = 0
        self.chosen_tokens = 0
        self.rounds_since_plan = 0
        self.probe_credit = 0.0
        self.probe_income = 0.0
        """Seconds for probes that each plain round earns."""
        self._batch_size = batch_size
        self._latest_due = 0.0

    @property
    def times(self) -> TargetTimes:
        return self.times_alone if self.turns else self.times_beside

    def observe(self, step: OutstandingStep[TargetWork], seconds: float) -> None:
        """Learns from what an answered step took."""
        work = step.work
        if work.any:
            self._times_of(step).observe(work.verify_rows, work.equal_length, work.prefill_rows, seconds)

    def expected_seconds(self, step: OutstandingStep[TargetWork]) -> float:
        work = step.work
        return self._times_of(step).predict(work.verify_rows, work.equal_length, work.prefill_rows)

    def _times_of(self, step: OutstandingStep[TargetWork]) -> TargetTimes:
        return self.times_alone if step.alone else self.times_beside

    def _no_work(self) -> TargetWork:
        return TargetWork()

    def due(self, now: float, wait_bound_steps: float) -> float:
        """Until when a sequence drafted now may be made to wait: the bound, after its turn by order of age.

        Those drafted before it go first in any case, a batch in a step; that wait is not the scheduler's choice.
        Nobody is due before one that was drafted earlier.
        """
        turn = len(self.drafted) // self._batch_size
        due = now + (wait_bound_steps + turn) * self.times.typical
        if due > self._latest_due:
            self._latest_due = due
        return self._latest_due

    def expected_end(self) -> float | None:
        """When the answer to the step that runs is expected; None when none does."""
        running = next(iter(self.outstanding.values()), None)
        if running is None:
            return None
        return self.running_since + self.expected_seconds(running) + self.overhead.value

    def can_prefill(self) -> bool:
        """Whether a sequence lacks committed tokens and has no row in flight."""
        return any(sequence_id not in self.in_flight for sequence_id in self.prefilling)

    def check_integrity(self) -> None:
        super().check_integrity()
        self.drafted.check_integrity()
