"""Takes sequences off draining targets, with their KV where that is sooner, and says when nothing is left there."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.fleet import Fleet
from scheduler.kv_moves import KvMove, KvMoves
from scheduler.lifecycle import PREFILLING, Lifecycle
from scheduler.messages import KvMoved, WorkerDrained
from scheduler.statistics import Counters
from scheduler.worker_book import TargetBook


class Relocation:
    """What follows from a target's draining, and from answers to `MoveKv`.

    Sequences leave between two rounds (`Lifecycle.begin_round`), so that no row of them is in flight; until then, and
    where no other target has room, they go on where they are.
    """

    def __init__(self, fleet: Fleet, lifecycle: Lifecycle, moves: KvMoves, counters: Counters) -> None:
        self._fleet = fleet
        self._lifecycle = lifecycle
        self._moves = moves
        self._counters = counters
        self._draining: dict[str, TargetBook] = {}

    def drain(self, worker_id: str) -> None:
        target = self._fleet.targets.get(worker_id)
        if target is None:
            self._lifecycle.commands.append(WorkerDrained(worker_id))
            return
        target.draining = True
        self._draining[worker_id] = target
        for sequence in list(target.sequences.values()):
            untouched = not target.kv[sequence.sequence_id].valid and sequence.sequence_id not in target.in_flight
            if sequence.state is PREFILLING and untouched:
                self._lifecycle.leave_target(sequence)

    def lose(self, target: TargetBook, now: float) -> None:
        """The target is gone; what has its home there goes elsewhere with the tokens it has."""
        for sequence in list(target.sequences.values()):
            if sequence.target is target:
                self._lifecycle.return_to_queue(sequence)
            else:
                self._lifecycle.stay(sequence, now)

    def moved(self, event: KvMoved, now: float) -> None:
        move = self._moves.take_answered(event.move_id)
        if move is None:
            return
        if event.moved:
            self._moves.times.observe(move.positions, event.seconds)
            self._counters.count_move(move.positions, event.size, event.seconds)
        else:
            self._counters.failed_moves += 1
        if move.abandoned:
            self._discard(move)
        elif event.moved:
            self._lifecycle.arrive(move, now)
        else:
            self._lifecycle.arrive_without_kv(move)

    def _discard(self, move: KvMove) -> None:
        """KV came for a sequence that has gone another way."""
        destination, sequence_id = move.destination, move.sequence.sequence_id
        if sequence_id not in destination.sequences:
            destination.releases[sequence_id] = None

    def drained(self) -> Iterator[WorkerDrained]:
        """Once of every draining target on which nothing is left, or which is gone."""
        for worker_id, target in list(self._draining.items()):
            gone = self._fleet.targets.get(worker_id) is not target
            if gone or not (target.sequences or target.outstanding or target.releases):
                del self._draining[worker_id]
                yield WorkerDrained(worker_id)
