"""Checks that the core's records agree with each other."""

from __future__ import annotations

from scheduler.state.fleet import Fleet
from scheduler.state.live_set import LiveSet
from scheduler.state.sequence_record import SequenceState
from scheduler.state.workers import Sequence, Worker


def check_integrity(live: LiveSet, fleet: Fleet) -> None:
    """Raises RuntimeError when any two of them differ."""
    live.check_integrity()
    placed: dict[Worker, int] = dict.fromkeys(fleet.workers(), 0)
    for sequence in live.running.values():
        move = sequence.kv_move
        for worker in (sequence.target, sequence.draft, move.destination if move is not None else None):
            if worker is None:
                continue
            if worker not in placed or worker.sequences.get(sequence.sequence_id) is not sequence:
                raise RuntimeError(f"sequence {sequence.sequence_id} is unknown to its worker {worker.worker_id}")
            placed[worker] += 1
        _check_indexed(sequence)
    for worker, count in placed.items():
        worker.check_integrity()
        if count != len(worker.sequences):
            raise RuntimeError(
                f"worker {worker.worker_id} has {len(worker.sequences)} sequences, {count} are placed there"
            )
    for target in fleet.targets.values():
        moving = sum(sequence.state is SequenceState.MOVING for sequence in target.sequences.values())
        indexed = len(target.prefilling) + target.coming.total + len(target.drafted) + target.verifying + moving
        indexed += len(target.suspects)
        if indexed != len(target.sequences):
            raise RuntimeError(
                f"target {target.worker_id} has {len(target.sequences)} sequences and {indexed} in its indexes"
            )
    for draft in fleet.drafts.values():
        verifying = sum(s.state is SequenceState.VERIFYING for s in draft.sequences.values())
        ready = sum(s.state is SequenceState.READY for s in draft.sequences.values())
        if (verifying, ready) != (len(draft.verifying), len(draft.ready)):
            raise RuntimeError(f"draft {draft.worker_id}: verifying or ready sequences are miscounted")


def _check_indexed(sequence: Sequence) -> None:
    target, draft = sequence.target, sequence.draft
    if target is None:
        raise RuntimeError(f"sequence {sequence.sequence_id} runs without a target")
    match sequence.state:
        case SequenceState.PREFILLING:
            indexed = sequence.sequence_id in (target.suspects if sequence.suspected else target.prefilling)
        case SequenceState.READY:
            indexed = draft is not None and sequence.sequence_id in draft.ready
        case SequenceState.DRAFTING:
            indexed = draft is not None and _has_row(sequence, draft)
        case SequenceState.DRAFTED:
            indexed = sequence.sequence_id in (target.suspects if sequence.suspected else target.drafted)
        case SequenceState.VERIFYING:
            indexed = _has_row(sequence, target)
        case SequenceState.MOVING:
            indexed = sequence.kv_move is not None and sequence.sequence_id not in target.in_flight
        case _:
            indexed = False
    if not indexed:
        raise RuntimeError(f"sequence {sequence.sequence_id} is {sequence.state.value} but not in that index")


def _has_row(sequence: Sequence, worker: Worker) -> bool:
    flight = worker.in_flight.get(sequence.sequence_id)
    return flight is not None and flight.sequence is sequence and not flight.abandoned
