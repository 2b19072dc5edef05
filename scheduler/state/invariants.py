"""Checks that the core's records agree with each other."""

from __future__ import annotations

from collections import Counter

from scheduler.messages import Row, SequenceState
from scheduler.state.fleet import Fleet
from scheduler.state.live_set import LiveSet
from scheduler.state.workers import IDLE, PREFILLING, VERIFYING, Sequence, TargetWorker


def check_integrity(live: LiveSet, fleet: Fleet) -> None:
    """Raises RuntimeError when any two of them differ."""
    if not live.is_right():
        raise RuntimeError("the live set disagrees with its waiting and running sequences, or with its keys")
    placed: dict[TargetWorker, int] = dict.fromkeys(fleet.targets.values(), 0)
    for sequence in live.running.values():
        move = sequence.kv_move
        for target in (sequence.target, move.destination if move is not None else None):
            if target is None:
                continue
            if target not in placed or target.sequences.get(sequence.sequence_id) is not sequence:
                raise RuntimeError(f"sequence {sequence.sequence_id} is unknown to its target {target.worker_id}")
            placed[target] += 1
        if not _is_indexed(sequence):
            raise RuntimeError(f"sequence {sequence.sequence_id} is {sequence.state.value} but not in that index")
    for target, count in placed.items():
        _require(target, count == len(target.sequences), f"has {len(target.sequences)} sequences, {count} are placed")
        _check_target(target)
        _check_grant(target, fleet)
    if sum(len(draft.targets) for draft in fleet.drafts.values()) != sum(one.draft is not None for one in placed):
        raise RuntimeError("a draft serves targets that have no grant for it")


def _is_indexed(sequence: Sequence) -> bool:
    target, sequence_id = sequence.target, sequence.sequence_id
    if target is None:
        return False
    match sequence.state:
        case SequenceState.PREFILLING | SequenceState.IDLE if sequence.suspected:
            return sequence_id in target.suspects
        case SequenceState.PREFILLING:
            return sequence_id in target.prefilling
        case SequenceState.IDLE:
            return sequence_id in target.idle
        case SequenceState.VERIFYING:
            row = target.in_flight.get(sequence_id)
            return row is not None and not row.abandoned
        case SequenceState.MOVING:
            return sequence.kv_move is not None and sequence_id not in target.in_flight
    return False


def _check_target(target: TargetWorker) -> None:
    reserved = sum(entry.pages for entry in target.kv.values()) + target.pages_of_moves
    pages = f"{reserved} pages reserved and {target.free_pages} free of {target.spec.total_pages}"
    _require(target, reserved + target.free_pages == target.spec.total_pages and target.free_pages >= 0, pages)
    _require(target, target.sequences.keys() == target.kv.keys(), "sequences and KV entries differ")
    for sequence_id, entry in target.kv.items():
        what = f"too few pages for {entry.valid} of sequence {sequence_id}"
        _require(target, entry.pages >= target.pages_for(entry.valid), what)
    sent = {id(row) for step in target.outstanding.values() for row in step.rows}
    for row in target.in_flight.values():
        known = row.abandoned or row.sequence_id in target.sequences
        _require(target, known, f"a row is in flight for sequence {row.sequence_id}, which left")
        before: Row | None = row
        while before is not None:
            _require(target, id(before) in sent, "rows in flight and outstanding steps differ")
            sent.remove(id(before))
            before = before.before
    _require(target, not sent, "rows in flight and outstanding steps differ")
    states = Counter(sequence.state for sequence in target.sequences.values())
    _require(target, target.verifying == states[VERIFYING], "verifying sequences are miscounted")
    indexed = len(target.prefilling) + len(target.idle) + len(target.suspects)
    _require(target, indexed == states[PREFILLING] + states[IDLE], "sequences that wait are miscounted")


def _check_grant(target: TargetWorker, fleet: Fleet) -> None:
    draft, grant = target.draft, target.grant
    if draft is None or grant is None:
        _require(target, draft is None and grant is None, "a grant is for a draft, and the draft has one")
        return
    known = fleet.drafts.get(grant.draft_id) is draft and draft.targets.get(target.worker_id) is target
    _require(
        target, known and not draft.draining, f"draft {grant.draft_id} is gone, or does not know that it serves it"
    )


def _require(target: TargetWorker, holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"worker {target.worker_id}: {what}")
