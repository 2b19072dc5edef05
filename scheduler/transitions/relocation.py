"""Drains targets: starts the departures of their sequences, and reports when none is left."""

from __future__ import annotations

from scheduler.messages import KvMoved, WorkerDrained
from scheduler.state.workers import KvMove, TargetWorker
from scheduler.transitions.lifecycle import PREFILLING, Lifecycle
from scheduler.transitions.parts import CoreParts


class Relocation:
    """Handles draining targets, lost targets, and answers to `MoveKv`.

    Sequences leave between two rounds (`Lifecycle.begin_round`), when no row of them is in flight. Until then, and
    while no other target has room, they go on where they are.
    """

    def __init__(self, parts: CoreParts, lifecycle: Lifecycle) -> None:
        self._parts = parts
        self._lifecycle = lifecycle
        self._draining: dict[str, TargetWorker] = {}

    def drain(self, worker_id: str) -> None:
        target = self._parts.fleet.targets.get(worker_id)
        if target is None:
            self._parts.emit(WorkerDrained(worker_id))
            return
        self._parts.fleet.drain(target)
        self._draining[worker_id] = target
        for sequence in list(target.sequences.values()):
            untouched = not target.kv[sequence.sequence_id].valid and sequence.sequence_id not in target.in_flight
            if sequence.state is PREFILLING and untouched:
                self._lifecycle.leave_target(sequence)

    def lose(self, target: TargetWorker, now: float) -> None:
        """The target is gone: its sequences return to the queue with their tokens, and moves to it end."""
        for sequence in list(target.sequences.values()):
            if sequence.target is target:
                self._lifecycle.return_to_queue(sequence)
            else:
                self._lifecycle.stay(sequence, now)

    def moved(self, event: KvMoved, now: float) -> None:
        move = self._parts.moves.take_answered(event.move_id)
        if move is None:
            return
        if event.moved:
            self._parts.controller.kv_moved(move.positions, event.seconds)
            self._parts.counters.count_move(move.positions, event.size, event.seconds)
        else:
            self._parts.counters.failed_moves += 1
        if move.abandoned:
            self._discard(move)
        elif event.moved:
            self._lifecycle.arrive(move, now)
        else:
            self._lifecycle.arrive_without_kv(move)

    def _discard(self, move: KvMove) -> None:
        """The KV that arrived is not needed any more: the destination releases it."""
        destination, sequence_id = move.destination, move.sequence.sequence_id
        if sequence_id not in destination.sequences:
            destination.releases[sequence_id] = None

    def report_drained(self) -> None:
        """Reports, once each, draining targets that hold nothing any more or are gone."""
        for worker_id, target in list(self._draining.items()):
            gone = self._parts.fleet.targets.get(worker_id) is not target
            if gone or not (target.sequences or target.outstanding or target.releases):
                del self._draining[worker_id]
                self._parts.emit(WorkerDrained(worker_id))
