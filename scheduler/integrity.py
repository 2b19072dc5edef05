"""Checks that the books of the core agree with each other."""

from __future__ import annotations

from scheduler.fleet import Fleet
from scheduler.pool import Pool
from scheduler.sequence import Sequence, SequenceState
from scheduler.worker_book import WorkerBook


def check_integrity(pool: Pool, fleet: Fleet) -> None:
    """Raises RuntimeError when any two of them differ."""
    pool.check_integrity()
    homes: dict[WorkerBook, int] = dict.fromkeys(fleet.books(), 0)
    for sequence in pool.window.values():
        move = sequence.kv_move
        for home in (sequence.target, sequence.draft, move.destination if move is not None else None):
            if home is None:
                continue
            if home not in homes or home.sequences.get(sequence.sequence_id) is not sequence:
                raise RuntimeError(f"sequence {sequence.sequence_id} is not known at its home {home.worker_id}")
            homes[home] += 1
        _check_filed(sequence)
    for book, count in homes.items():
        book.check_integrity()
        if count != len(book.sequences):
            raise RuntimeError(f"worker {book.worker_id} has {len(book.sequences)} sequences, {count} say so")
    for target in fleet.targets.values():
        moving = sum(sequence.state is SequenceState.MOVING for sequence in target.sequences.values())
        filed = len(target.prefilling) + target.coming.total + len(target.drafted) + target.verifying + moving
        if filed != len(target.sequences):
            raise RuntimeError(f"target {target.worker_id} has {len(target.sequences)} sequences and {filed} filed")
    for draft in fleet.drafts.values():
        verifying = sum(s.state is SequenceState.VERIFYING for s in draft.sequences.values())
        ready = sum(s.state is SequenceState.READY for s in draft.sequences.values())
        if (verifying, ready) != (draft.verifying, len(draft.ready)):
            raise RuntimeError(f"draft {draft.worker_id}: verifying or ready sequences are miscounted")


def _check_filed(sequence: Sequence) -> None:
    target, draft = sequence.target, sequence.draft
    if target is None:
        raise RuntimeError(f"sequence {sequence.sequence_id} is in the window without a target")
    match sequence.state:
        case SequenceState.PREFILLING:
            filed = sequence.sequence_id in target.prefilling
        case SequenceState.READY:
            filed = draft is not None and sequence.sequence_id in draft.ready
        case SequenceState.DRAFTING:
            filed = draft is not None and _has_row(sequence, draft)
        case SequenceState.DRAFTED:
            filed = sequence.sequence_id in target.drafted
        case SequenceState.VERIFYING:
            filed = _has_row(sequence, target)
        case SequenceState.MOVING:
            filed = sequence.kv_move is not None and sequence.sequence_id not in target.in_flight
        case _:
            filed = False
    if not filed:
        raise RuntimeError(f"sequence {sequence.sequence_id} is {sequence.state.value} but not filed so")


def _has_row(sequence: Sequence, book: WorkerBook) -> bool:
    flight = book.in_flight.get(sequence.sequence_id)
    return flight is not None and flight.sequence is sequence and not flight.abandoned
