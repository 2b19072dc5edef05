"""Which workers hold which sequences: the two ends of one relation, so both are in one module.

A sequence knows its target and its draft worker. A worker knows its sequences: by id, and by the state of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.messages import SequenceRequest, WorkerSpec
from scheduler.state.indexes import CountByLength, DraftedIndex
from scheduler.state.key_accounts import KeyAccount
from scheduler.state.sequence_record import SequenceRecord, SequenceState
from scheduler.state.worker_base import DraftWork, TargetWork, WorkerState

# Looked up for every row: names are faster than attributes of the enumeration.
_PREFILLING, _READY, _DRAFTING = SequenceState.PREFILLING, SequenceState.READY, SequenceState.DRAFTING
_DRAFTED, _VERIFYING = SequenceState.DRAFTED, SequenceState.VERIFYING

STEADY_KV_LAG = 2
"""The largest KV lag of a draft between rounds, in tokens: its own last proposal and the bonus token."""


class Sequence(SequenceRecord):
    """A live sequence and its place: a target worker and, if any had room, a draft worker; both hold KV of it.

    `kv_move` is set while the KV moves to another target, where the sequence is placed as well then.
    """

    __slots__ = ("draft", "kv_move", "target")

    def __init__(self, request: SequenceRequest, order: int, account: KeyAccount) -> None:
        super().__init__(request, order, account)
        self.target: TargetWorker | None = None
        self.draft: DraftWorker | None = None
        self.kv_move: KvMove | None = None


@dataclass(slots=True, eq=False)
class KvMove:
    """One sequence's KV on its way between two targets.

    `abandoned` once the sequence no longer needs it: the KV that arrives is released then.
    """

    move_id: int
    sequence: Sequence
    source: TargetWorker
    destination: TargetWorker
    positions: int
    abandoned: bool = False


class DraftWorker(WorkerState[Sequence, DraftWork]):
    """A draft worker: the sequences that are `ready` for a proposal, and those whose KV must catch up (`lagging`)."""

    def __init__(self, spec: WorkerSpec, prefill_chunk: int, steps_in_flight: int) -> None:
        super().__init__(spec, prefill_chunk, steps_in_flight)
        self.ready: dict[int, Sequence] = {}
        self.lagging: dict[int, Sequence] = {}
        self.max_kv_lag = min(max(self.chunk, STEADY_KV_LAG), spec.max_num_batched_tokens)
        """Committed tokens that one step can feed before it proposes."""
        self.verifying: dict[int, Sequence] = {}
        """Those placed here that a target is verifying: they may come back any moment."""
        self.watches_targets = False
        """Whether a step that can be sent here depends on what the targets do next."""

    def _no_work(self) -> DraftWork:
        return DraftWork()

    def kv_lag(self, sequence: Sequence) -> int:
        """Committed tokens whose KV is missing; at least 1, since a proposal needs the logits of the last one."""
        missing = sequence.length - self.kv[sequence.sequence_id].valid
        return missing if missing > 1 else 1

    def update_lagging(self, sequence: Sequence) -> int:
        """Updates `lagging`; to be called when the sequence's length, KV or `wants_draft_kv` has changed.

        Returns the sequence's KV lag.
        """
        missing = sequence.length - self.kv[sequence.sequence_id].valid
        if missing > STEADY_KV_LAG and sequence.wants_draft_kv:
            self.lagging.setdefault(sequence.sequence_id, sequence)
            self.changed = True
        elif self.lagging:
            self.lagging.pop(sequence.sequence_id, None)
        return missing if missing > 1 else 1

    def place(self, sequence: Sequence, positions: int) -> None:
        super().place(sequence, positions)
        self.update_lagging(sequence)

    def evict(self, sequence: Sequence) -> None:
        super().evict(sequence)
        self.lagging.pop(sequence.sequence_id, None)

    def reindex(self, sequence: Sequence, before: SequenceState, after: SequenceState) -> None:
        """Moves the sequence from the index of one state to that of another.

        WAITING has no index: it stands for a worker that the sequence comes from or goes to as well.
        """
        self.changed = True
        if before is _READY:
            del self.ready[sequence.sequence_id]
        elif before is _VERIFYING:
            del self.verifying[sequence.sequence_id]
        if after is _READY:
            self.ready[sequence.sequence_id] = sequence
        elif after is _VERIFYING:
            self.verifying[sequence.sequence_id] = sequence

    @property
    def works_ahead(self) -> bool:
        """Whether all that is in flight here is preparation, which ends as soon as another step waits."""
        return all(flight.row.outcomes for step in self.outstanding.values() for flight in step.rows)

    def check_integrity(self) -> None:
        super().check_integrity()
        for sequence_id, sequence in self.sequences.items():
            lags = sequence.wants_draft_kv and self.kv_lag(sequence) > STEADY_KV_LAG
            if lags != (sequence_id in self.lagging):
                raise RuntimeError(f"draft worker {self.worker_id}: lagging is wrong about sequence {sequence_id}")
        if not (self.ready.keys() <= self.sequences.keys() and self.lagging.keys() <= self.sequences.keys()):
            raise RuntimeError(f"draft worker {self.worker_id}: sequences that left are ready or lagging")


class TargetWorker(WorkerState[Sequence, TargetWork]):
    """A target worker: the sequences to prefill, those to verify, and those being drafted for."""

    def __init__(self, spec: WorkerSpec, prefill_chunk: int, steps_in_flight: int, batch_size: int) -> None:
        super().__init__(spec, prefill_chunk, steps_in_flight)
        self.longest_draft = max(0, spec.max_num_batched_tokens // 2 - 1)
        """The most draft tokens of a row: two rows always fit a step, so that verification cannot shut prefill out."""
        self.prefilling: dict[int, Sequence] = {}
        """PREFILLING sequences in the order in which they came here, which is the order of admission."""
        self.drafted: DraftedIndex[Sequence] = DraftedIndex(batch_size)
        self.coming = CountByLength()
        """READY and DRAFTING sequences."""
        self.suspects: dict[int, Sequence] = {}
        """Suspected sequences, PREFILLING or DRAFTED, which are in no other index: their rows go alone."""
        self.lone_step: int | None = None
        """The last step with a suspect's row, beside which none may be in flight."""
        self.lone_step_was_last = False
        self.verifying = 0
        self.waits_until: float | None = None
        """Until when those to verify wait at most, for others or for the step under way; None where nothing waits."""
        self._batch_size = batch_size
        self._latest_due = 0.0

    def _no_work(self) -> TargetWork:
        return TargetWork()

    def reindex(self, sequence: Sequence, before: SequenceState, after: SequenceState) -> None:
        """Moves the sequence from the index of one state to that of another; WAITING has none, as in `DraftWorker`."""
        self.changed = True
        if sequence.sequence_id in self.suspects:
            del self.suspects[sequence.sequence_id]
        elif before is _DRAFTED:
            self.drafted.remove(sequence)
        elif before is _VERIFYING:
            self.verifying -= 1
        elif before is _PREFILLING:
            del self.prefilling[sequence.sequence_id]
        elif (before is _READY or before is _DRAFTING) and after is not _DRAFTING:
            self.coming.remove(sequence.length)
        if sequence.suspected and (after is _DRAFTED or after is _PREFILLING):
            self.suspects[sequence.sequence_id] = sequence
        elif after is _DRAFTED:
            self.drafted.add(sequence)
        elif after is _VERIFYING:
            self.verifying += 1
        elif after is _PREFILLING:
            self.prefilling[sequence.sequence_id] = sequence
        elif after is _READY or (after is _DRAFTING and before is not _READY):
            self.coming.add(sequence.length)

    def due(self, now: float, wait_bound_steps: float, step_seconds: float) -> float:
        """Until when a sequence drafted now may be made to wait: the bound, counted from its place in the queue.

        Sequences drafted earlier go first in any case, a batch in each step of `step_seconds`; that wait is not a
        choice. No sequence is due before one that was drafted earlier.
        """
        due = now + (wait_bound_steps + len(self.drafted) // self._batch_size) * step_seconds
        if due > self._latest_due:
            self._latest_due = due
        return self._latest_due

    def count(self, state: SequenceState) -> int:
        """Sequences that are PREFILLING or DRAFTED."""
        suspects = sum(sequence.state is state for sequence in self.suspects.values())
        return suspects + (len(self.prefilling) if state is _PREFILLING else len(self.drafted))

    def next_suspect(self) -> Sequence | None:
        """The suspect that came first of those that have no row in flight."""
        idle = (one for sequence_id, one in self.suspects.items() if sequence_id not in self.in_flight)
        return min(idle, key=lambda sequence: sequence.order, default=None)

    def can_prefill(self) -> bool:
        """Whether any sequence to prefill has no row in flight."""
        return any(sequence_id not in self.in_flight for sequence_id in self.prefilling)

    def following(self, sequence: Sequence) -> bool:
        """Whether the sequence's next row is under way: it follows the one whose answer has just been committed."""
        flight = self.in_flight.get(sequence.sequence_id)
        return flight is not None and not flight.abandoned and flight.row.kv_len == sequence.length - 1

    def can_follow(self) -> list[Sequence]:
        """The sequences with a row in the step that was sent last, which feeds all committed tokens and samples one."""
        last = next(reversed(self.outstanding.values()), None)
        return [
            flight.sequence
            for flight in (last.rows if last is not None else ())
            if flight.row.sample and not (flight.row.draft_tokens or flight.abandoned or flight.sequence.suspected)
            if flight.row.end == flight.sequence.length
        ]

    def prefill_from(self, sequence: Sequence) -> int | None:
        """The position from which the next chunk of a PREFILLING sequence feeds; None where the sequence must wait for
        an answer.

        A chunk may follow another one that is in flight. Where the worker has more of the prompt from others, which it
        says in its answers, a chunk that was sent before costs it nothing, and the next goes on behind that.
        """
        valid, flight = self.kv[sequence.sequence_id].valid, self.in_flight.get(sequence.sequence_id)
        if flight is None:
            return valid
        if flight.abandoned or flight.row.sample or sequence.suspected:
            return None
        return max(valid, flight.row.end)

    def check_integrity(self) -> None:
        super().check_integrity()


Worker = DraftWorker | TargetWorker
