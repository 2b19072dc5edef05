"""What the core knows of any worker: its KV and pages, and the steps that it has not answered.

Draft and target workers, with the work that waits for each, are in workers.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import dataclass
from typing import Generic, TypeVar

from scheduler.messages import GroupFormed, Row, SendStep, SequenceRequest, WorkerSpec
from scheduler.state.kv_ledger import KvEntry, PageLedger
from scheduler.state.prefixes import KnownPrefixes
from scheduler.state.sequence_record import SequenceRecord

Member = TypeVar("Member", bound=SequenceRecord)
"""A worker's sequences. The workers of workers.py hold `Sequence`s, which in turn know their workers."""


@dataclass(slots=True, eq=False)
class InFlightRow(Generic[Member]):
    """A row that was sent and not answered; `before` is the row of the sequence in flight that comes before it.

    `abandoned` once its sequence left the worker, or the row before it failed: the answer is ignored.
    """

    sequence: Member
    row: Row
    abandoned: bool = False
    before: InFlightRow[Member] | None = None


@dataclass(slots=True)
class TargetWork:
    """Batched tokens of a target step, those to verify and those of prefill; and the tokens of KV that it reads."""

    verify_tokens: int = 0
    prefill_tokens: int = 0
    kv_tokens: int = 0

    @property
    def any(self) -> bool:
        return self.verify_tokens > 0 or self.prefill_tokens > 0

    def leave_out(self, tokens: int) -> None:
        """So many tokens of prefill needed no work."""
        self.prefill_tokens = max(0, self.prefill_tokens - tokens)


@dataclass(slots=True)
class DraftWork:
    """What a draft step does: its passes, the tokens that it proposes, the committed tokens that it feeds, and the
    tokens of KV that its passes read."""

    passes: int = 1
    proposed_tokens: int = 0
    catch_up_tokens: int = 0
    kv_tokens: int = 0

    @property
    def any(self) -> bool:
        return self.proposed_tokens > 0 or self.catch_up_tokens > 0

    def leave_out(self, tokens: int) -> None:
        """So many tokens to catch up with needed no work."""
        self.catch_up_tokens = max(0, self.catch_up_tokens - tokens)

    def add(self, fed: int, draft_length: int, kv_len: int) -> None:
        if draft_length:
            self.kv_tokens += kv_len * draft_length
            if draft_length > self.passes:
                self.passes = draft_length
            self.proposed_tokens += draft_length
            self.catch_up_tokens += fed - 1
        else:
            self.kv_tokens += kv_len
            self.catch_up_tokens += fed

    def add_prepared(self, fed: int, length: int, proposed: int, kv_len: int) -> None:
        """A row that prepares: a pass over the tokens fed, and one for each token of its proposals."""
        self.passes = max(self.passes, 1 + length)
        self.kv_tokens += kv_len * (1 + proposed)
        self.proposed_tokens += proposed
        self.catch_up_tokens += fed


Work = TypeVar("Work", TargetWork, DraftWork)


@dataclass(slots=True, eq=False)
class OutstandingStep(Generic[Member, Work]):
    """A step that was sent and not answered. `sent_at` is None where the worker had another step then."""

    rows: list[InFlightRow[Member]]
    work: Work
    group: GroupFormed | None
    sent_at: float | None

    def elapsed(self, now: float) -> float | None:
        """Seconds since the step was sent; None where the worker had another step then."""
        return None if self.sent_at is None else now - self.sent_at


class WorkerState(ABC, Generic[Member, Work]):
    """The state of one worker. `sequences` are those placed here, `releases` those whose KV the worker may free."""

    def __init__(self, spec: WorkerSpec, prefill_chunk: int, steps_in_flight: int) -> None:
        self.spec = spec
        self.worker_id = spec.worker_id
        self.chunk = min(prefill_chunk, spec.max_num_batched_tokens)
        self.capacity = min(spec.max_sequence_length, spec.total_pages * spec.page_size)
        """Tokens of the longest sequence that fits when no other is placed here."""
        self.pages = PageLedger(spec.total_pages, spec.page_size)
        self.prefixes = KnownPrefixes(spec.page_size, spec.total_pages)
        self.kv: dict[int, KvEntry] = {}
        self.sequences: dict[int, Member] = {}
        self.in_flight: dict[int, InFlightRow[Member]] = {}
        """The latest row of each sequence that has one in flight."""
        self.outstanding: dict[int, OutstandingStep[Member, Work]] = {}
        self.releases: dict[int, None] = {}
        self.changed = True
        """Whether anything here has changed since the worker was last asked for a step."""
        self.draining = False
        """Whether the worker gets no new sequences, since it will leave."""
        self._steps_in_flight = steps_in_flight

    @property
    def can_take_step(self) -> bool:
        return len(self.outstanding) < self._steps_in_flight

    @property
    def busy(self) -> bool:
        """Whether rows are in flight; a step that only releases takes no time."""
        return bool(self.in_flight)

    def has_room(self, positions: int) -> bool:
        pages = self.pages
        return positions <= self.capacity and pages.pages_for(positions) + self._spare() <= pages.free_pages

    def _spare(self) -> int:
        """Pages kept back from newcomers, for the sequences here to grow into."""
        return -(-len(self.sequences) // 4)

    def place(self, sequence: Member, positions: int) -> None:
        """Places the sequence here. `has_room` must have said yes; raises RuntimeError otherwise."""
        if not self.pages.reserve(sequence.sequence_id, positions):
            raise RuntimeError(f"no pages for sequence {sequence.sequence_id} on worker {self.worker_id}")
        self.sequences[sequence.sequence_id] = sequence
        self.kv[sequence.sequence_id] = KvEntry()
        self.prefixes.add(sequence.request.cache_scope, sequence.tokens)

    def evict(self, sequence: Member) -> None:
        """Removes the sequence. What the worker holds of it is released with the next step."""
        sequence_id = sequence.sequence_id
        self.changed = True
        del self.sequences[sequence_id]
        self.pages.release(sequence_id)
        if self.kv.pop(sequence_id).opened:
            self.releases[sequence_id] = None
        self.abandon_rows(sequence_id)

    def abandon_rows(self, sequence_id: int) -> None:
        """Ignores the answers to all rows of the sequence that are in flight."""
        flight = self.in_flight.get(sequence_id)
        while flight is not None:
            flight.abandoned = True
            flight = flight.before

    def row_answered(self, flight: InFlightRow[Member]) -> None:
        """The row is no longer in flight. The row is abandoned if its answer came before the answer to the sequence's
        previous row: what the previous row fed is not known yet. So are rows that follow an abandoned one."""
        flight.abandoned |= flight.before is not None
        sequence_id = flight.row.sequence_id
        later = self.in_flight[sequence_id]
        if later is not flight:
            later.abandoned |= flight.abandoned and later.row.follows
            while later.before is not None and later.before is not flight:
                later = later.before
                later.abandoned |= flight.abandoned and later.row.follows
            later.before = flight.before
        elif flight.before is not None:
            self.in_flight[sequence_id] = flight.before
        else:
            del self.in_flight[sequence_id]

    def has_behind(self, sequence: Member) -> bool:
        """Whether any sequence here gives way to this one: it is of less priority, or younger."""
        return any(other.rank > sequence.rank for other in self.sequences.values())

    def last_idle(self, sequence: Member, excluded: Container[int]) -> Member | None:
        """The sequence that gives way first, of those here that give way to this one, have no row in flight and are not
        `excluded`."""
        last, rank = None, sequence.rank
        for sequence_id, other in self.sequences.items():
            if other.rank > rank and sequence_id not in self.in_flight and sequence_id not in excluded:
                last, rank = other, other.rank
        return last

    def make_row(
        self,
        sequence: Member,
        end: int,
        draft_tokens: tuple[int, ...] = (),
        draft_length: int = 0,
        sample: bool = False,
        after: InFlightRow[Member] | None = None,
    ) -> Row:
        """A row that feeds committed tokens up to position `end`, at least one. It must be sent.

        It begins where valid KV ends, or where the row `after` will have ended it.
        """
        sequence_id, tokens = sequence.sequence_id, sequence.tokens
        entry = self.kv[sequence_id]
        valid = entry.valid if after is None else max(entry.valid, after.row.end)
        start = valid if valid < end else end - 1
        opening: SequenceRequest | None = None
        committed: tuple[int, ...] = ()
        if not entry.opened:
            entry.opened = True
            opening = sequence.request
            committed = tuple(tokens.tokens[: self.pages.reserved(sequence_id) * self.spec.page_size])
            entry.known = len(committed)
        return Row(
            sequence_id,
            start,
            tokens.digest(start),
            tuple(tokens.tokens[start:end]),
            draft_tokens,
            draft_length,
            sample,
            opening,
            committed,
            known=end <= entry.known,
        )

    def send(
        self,
        step_id: int,
        rows: dict[int, InFlightRow[Member]],
        work: Work,
        now: float,
        group: GroupFormed | None = None,
    ) -> SendStep:
        """Records a step with these rows and all pending releases as sent; returns the command for it."""
        self.changed = True
        released = tuple(self.releases)
        self.releases.clear()
        self.in_flight.update(rows)
        flights = list(rows.values())
        self.outstanding[step_id] = OutstandingStep(flights, work, group, None if self.outstanding else now)
        return SendStep(self.worker_id, step_id, tuple([flight.row for flight in flights]), released, group)

    def release(self, step_id: int, now: float) -> SendStep:
        """A step that only carries the pending releases."""
        return self.send(step_id, {}, self._no_work(), now)

    @abstractmethod
    def _no_work(self) -> Work: ...

    def take_answered(self, step_id: int) -> OutstandingStep[Member, Work] | None:
        """Removes and returns the step that was answered. Its rows stay in flight until each result was applied."""
        step = self.outstanding.pop(step_id, None)
        if step is not None:
            self.changed = True
        return step

    def check_integrity(self) -> None:
        """Raises RuntimeError when this worker's records disagree."""
        self.pages.check_integrity()
        if not self.sequences.keys() == self.kv.keys():
            raise RuntimeError(f"worker {self.worker_id}: sequences and KV ledger differ")
        sent = {id(flight) for step in self.outstanding.values() for flight in step.rows}
        for latest in self.in_flight.values():
            flight: InFlightRow[Member] | None = latest
            while flight is not None:
                if id(flight) not in sent:
                    raise RuntimeError(f"worker {self.worker_id}: rows in flight and outstanding steps differ")
                sent.remove(id(flight))
                flight = flight.before
        if sent:
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
