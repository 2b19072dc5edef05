"""What the core knows of one worker: its KV and pages, the steps it owes an answer for, the work that waits for it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from scheduler.drafted import CountByLength, DraftedIndex
from scheduler.ledger import KvEntry, PageBook
from scheduler.messages import GroupFormed, Row, SendStep, WorkerSpec
from scheduler.sequence import Sequence
from scheduler.step_times import LinearFit, VerifyTimes

STEADY_LACK = 2
"""Committed tokens a draft lacks at most between rounds: its own last proposal and the bonus token."""


@dataclass(slots=True, eq=False)
class InFlightRow:
    """A row on its way. `abandoned` once its sequence left the worker: the answer then means nothing."""

    sequence: Sequence
    row: Row
    abandoned: bool = False


@dataclass(slots=True, eq=False)
class OutstandingStep:
    """A step sent and not answered. `proposals` counts its proposing rows by the target they are for."""

    rows: list[InFlightRow]
    packed_rows: int
    group: GroupFormed | None
    proposals: dict[str, int]


class WorkerBook:
    """Books of one worker. `sequences` are those that have their home here."""

    def __init__(self, spec: WorkerSpec, prefill_chunk: int, steps_in_flight: int) -> None:
        self.spec = spec
        self.worker_id = spec.worker_id
        self.chunk = min(prefill_chunk, spec.max_packed_rows)
        self.pages = PageBook(spec.total_pages, spec.page_size)
        self.kv: dict[int, KvEntry] = {}
        self.sequences: dict[int, Sequence] = {}
        self.in_flight: dict[int, InFlightRow] = {}
        self.outstanding: dict[int, OutstandingStep] = {}
        self.releases: dict[int, None] = {}
        self.running_since = 0.0
        self._steps_in_flight = steps_in_flight

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
        """A row that feeds committed tokens up to position `end`, which must leave one to feed."""
        entry = self.kv[sequence.sequence_id]
        start = min(entry.valid, end - 1)
        return Row(
            sequence.sequence_id,
            start,
            sequence.tokens.digest(start),
            tuple(sequence.tokens.tokens[start:end]),
            draft_tokens,
            draft_length,
            choose,
            None if entry.opened else sequence.request,
        )

    def send(
        self, step_id: int, rows: dict[int, InFlightRow], now: float, group: GroupFormed | None = None
    ) -> SendStep:
        """Books a step with these rows and all pending releases, and returns the command for it."""
        released = tuple(self.releases)
        self.releases.clear()
        packed_rows = 0
        proposals: dict[str, int] = {}
        for sequence_id, flight in rows.items():
            self.kv[sequence_id].opened = True
            row = flight.row
            packed_rows += len(row.tokens) + len(row.draft_tokens)
            target = flight.sequence.target
            if row.draft_length and target is not None:
                proposals[target.worker_id] = proposals.get(target.worker_id, 0) + 1
        self.in_flight.update(rows)
        if not self.outstanding:
            self.running_since = now
        flights = list(rows.values())
        self.outstanding[step_id] = OutstandingStep(flights, packed_rows, group, proposals)
        return SendStep(self.worker_id, step_id, tuple(flight.row for flight in flights), released, group)

    def take_answered(self, step_id: int, now: float) -> OutstandingStep | None:
        """The step that was answered, out of the books; its rows stay in flight until each was looked at."""
        step = self.outstanding.pop(step_id, None)
        if step is not None:
            self.running_since = now
        return step

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


class DraftBook(WorkerBook):
    """A draft worker: what is ready to be proposed for, and whose KV lags behind its committed tokens."""

    def __init__(self, spec: WorkerSpec, prefill_chunk: int, steps_in_flight: int, initial_seconds: float) -> None:
        super().__init__(spec, prefill_chunk, steps_in_flight)
        self.ready: dict[int, Sequence] = {}
        self.lagging: dict[int, Sequence] = {}
        self.verifying = 0
        """Sequences at home here that a target is verifying: they may come back any moment."""
        self.times = LinearFit(initial_seconds)

    def lack(self, sequence: Sequence) -> int:
        """Committed tokens whose KV is missing; at least 1, since proposing takes the logits of the last one."""
        return max(1, len(sequence.tokens.tokens) - self.kv[sequence.sequence_id].valid)

    def can_propose_after(self, lack: int) -> bool:
        """Whether one step can feed that many tokens and propose after them."""
        return lack <= min(max(self.chunk, STEADY_LACK), self.spec.max_packed_rows)

    def note_lack(self, sequence: Sequence) -> None:
        """Files the sequence by whether it must catch up; to be called when its length or its KV has changed."""
        if self.lack(sequence) > STEADY_LACK:
            self.lagging.setdefault(sequence.sequence_id, sequence)
        else:
            self.lagging.pop(sequence.sequence_id, None)

    def house(self, sequence: Sequence, positions: int) -> None:
        super().house(sequence, positions)
        self.note_lack(sequence)

    def evict(self, sequence: Sequence) -> None:
        super().evict(sequence)
        self.lagging.pop(sequence.sequence_id, None)

    def expected_end(self, step: OutstandingStep) -> float:
        return self.running_since + self.times.predict(step.packed_rows)

    def check_integrity(self) -> None:
        super().check_integrity()
        for sequence_id, sequence in self.sequences.items():
            if (self.lack(sequence) > STEADY_LACK) != (sequence_id in self.lagging):
                raise RuntimeError(f"draft worker {self.worker_id}: sequence {sequence_id} is filed wrongly")
        if not (self.ready.keys() <= self.sequences.keys() and self.lagging.keys() <= self.sequences.keys()):
            raise RuntimeError(f"draft worker {self.worker_id}: work is filed for sequences that left")


class TargetBook(WorkerBook):
    """A target worker: what it must prefill, what it can verify, and what is on its way to that."""

    def __init__(
        self, spec: WorkerSpec, prefill_chunk: int, steps_in_flight: int, initial_seconds: float, batch_size: int
    ) -> None:
        super().__init__(spec, prefill_chunk, steps_in_flight)
        self.prefilling: dict[int, Sequence] = {}
        self.drafted = DraftedIndex(batch_size)
        self.coming = CountByLength()
        """READY and DRAFTING sequences."""
        self.verifying = 0
        self.times = VerifyTimes(initial_seconds)
        self._batch_size = batch_size
        self._latest_due = 0.0

    @property
    def longest_draft(self) -> int:
        """Draft tokens of a row at most, so that two rows always fit a step and prefill cannot be shut out."""
        return max(0, self.spec.max_packed_rows // 2 - 1)

    def due(self, now: float, wait_bound_steps: float) -> float:
        """Until when a sequence drafted now may be made to wait: the bound, after its turn by order of age.

        Those drafted before it go first in any case, a batch in a step; that wait is not the scheduler's choice.
        Nobody is due before one that was drafted earlier.
        """
        turn = len(self.drafted) // self._batch_size
        self._latest_due = max(self._latest_due, now + (wait_bound_steps + turn) * self.times.typical)
        return self._latest_due

    def can_prefill(self) -> bool:
        """Whether a sequence lacks committed tokens and has no row in flight."""
        return any(sequence_id not in self.in_flight for sequence_id in self.prefilling)

    def check_integrity(self) -> None:
        super().check_integrity()
        self.drafted.check_integrity()
