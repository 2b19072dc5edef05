"""Checks that the core's records agree with each other."""

from __future__ import annotations

from collections import Counter

from scheduler.messages import Row, SequenceState
from scheduler.state.fleet import Fleet
from scheduler.state.live_set import LiveSet
from scheduler.state.workers import (
    DRAFTED,
    DRAFTING,
    PREFILLING,
    READY,
    STEADY_KV_LAG,
    VERIFYING,
    Sequence,
    TargetWorker,
    Worker,
)


def check_integrity(live: LiveSet, fleet: Fleet) -> None:
    """Raises RuntimeError when any two of them differ."""
    if not live.is_right():
        raise RuntimeError("the live set disagrees with its waiting and running sequences, or with its keys")
    placed: dict[Worker, int] = dict.fromkeys(fleet.workers(), 0)
    for sequence in live.running.values():
        move = sequence.kv_move
        for worker in (sequence.target, sequence.draft, move.destination if move is not None else None):
            if worker is None:
                continue
            if worker not in placed or worker.sequences.get(sequence.sequence_id) is not sequence:
                raise RuntimeError(f"sequence {sequence.sequence_id} is unknown to its worker {worker.worker_id}")
            placed[worker] += 1
        if not _is_indexed(sequence):
            raise RuntimeError(f"sequence {sequence.sequence_id} is {sequence.state.value} but not in that index")
    for worker, count in placed.items():
        _require(worker, count == len(worker.sequences), f"has {len(worker.sequences)} sequences, {count} are placed")
        _check_worker(worker)


def _is_indexed(sequence: Sequence) -> bool:
    target, draft, sequence_id = sequence.target, sequence.draft, sequence.sequence_id
    if target is None:
        return False
    match sequence.state:
        case SequenceState.PREFILLING | SequenceState.DRAFTED if sequence.suspected:
            return sequence_id in target.suspects
        case SequenceState.PREFILLING:
            return sequence_id in target.prefilling
        case SequenceState.DRAFTED:
            return sequence_id in target.drafted
        case SequenceState.READY:
            return draft is not None and sequence_id in draft.ready
        case SequenceState.DRAFTING | SequenceState.VERIFYING:
            worker = draft if sequence.state is DRAFTING else target
            row = None if worker is None else worker.in_flight.get(sequence_id)
            return row is not None and not row.abandoned
        case SequenceState.MOVING:
            return sequence.kv_move is not None and sequence_id not in target.in_flight
    return False


def _check_worker(worker: Worker) -> None:
    reserved = sum(entry.pages for entry in worker.kv.values()) + worker.pages_of_moves
    pages = f"{reserved} pages reserved and {worker.free_pages} free of {worker.spec.total_pages}"
    _require(worker, reserved + worker.free_pages == worker.spec.total_pages and worker.free_pages >= 0, pages)
    _require(worker, worker.sequences.keys() == worker.kv.keys(), "sequences and KV entries differ")
    for sequence_id, entry in worker.kv.items():
        held = entry.valid + entry.ahead
        _require(worker, entry.pages >= worker.pages_for(held), f"too few pages for {held} of sequence {sequence_id}")
    sent = {id(row) for step in worker.outstanding.values() for row in step.rows}
    for row in worker.in_flight.values():
        known = row.abandoned or row.sequence_id in worker.sequences
        _require(worker, known, f"a row is in flight for sequence {row.sequence_id}, which left")
        before: Row | None = row
        while before is not None:
            _require(worker, id(before) in sent, "rows in flight and outstanding steps differ")
            sent.remove(id(before))
            before = before.before
    _require(worker, not sent, "rows in flight and outstanding steps differ")
    states = Counter(sequence.state for sequence in worker.sequences.values())
    _require(worker, worker.verifying == states[VERIFYING], "verifying sequences are miscounted")
    if isinstance(worker, TargetWorker):
        indexed = len(worker.prefilling) + len(worker.drafted) + len(worker.suspects)
        _require(worker, indexed == states[PREFILLING] + states[DRAFTED], "sequences that wait are miscounted")
        _require(worker, worker.coming == states[READY] + states[DRAFTING], "sequences to draft for are miscounted")
        return
    _require(worker, len(worker.ready) == states[READY], "ready sequences are miscounted")
    lags = {
        sequence_id
        for sequence_id, sequence in worker.sequences.items()
        if sequence.wants_draft_kv and worker.kv_lag(sequence) > STEADY_KV_LAG
    }
    _require(worker, lags == worker.lagging.keys(), f"lagging is wrong about {lags ^ worker.lagging.keys()}")


def _require(worker: Worker, holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"worker {worker.worker_id}: {what}")
