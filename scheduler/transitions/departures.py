"""Which sequences leave their target between two rounds, where they go, and whether their KV goes with them."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.config import SchedulerConfig
from scheduler.speculation.controller import Controller
from scheduler.state.fleet import Fleet
from scheduler.state.pending_kv_moves import KvMoves
from scheduler.state.sequence_record import SequenceState
from scheduler.state.workers import Sequence, TargetWorker

_MOST_FROM_DRAINING = 4
"""Sequences whose KV may leave a draining target at the same time; the others go on decoding there meanwhile."""


@dataclass(frozen=True, slots=True)
class Departure:
    """To another target, with the sequence's KV or to compute it anew there."""

    destination: TargetWorker
    with_kv: bool


class Departures:
    """Decides for one sequence at a time, when none of its rows is in flight on its target.

    A draining target loses all its sequences. A crowded one, which has more sequences than a batch, loses some to a
    target that has room and clearly fewer of them (`Fleet.pick_relief`), where what a sequence gains there is worth
    the way (`_seconds_saved`). Within a batch, a sequence more costs the others next to nothing.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        fleet: Fleet,
        controller: Controller,
        moves: KvMoves,
        max_per_target: int | None,
    ) -> None:
        self._batch_size = config.batch_size
        self._fleet = fleet
        self._controller = controller
        self._moves = moves
        self._max_per_target = max_per_target

    def possible(self, source: TargetWorker) -> bool:
        """Whether any sequence may leave the target at present; quick, since it is asked in every round."""
        return source.draining or (len(source.sequences) > self._batch_size and len(self._fleet.targets) > 1)

    def find(self, sequence: Sequence, source: TargetWorker, positions: int) -> Departure | None:
        """Where the sequence goes, which needs room for so many positions. None: it stays, at least for this round."""
        if source.draining:
            return self._from_draining(sequence, source, positions)
        return self._from_crowded(sequence, source, positions)

    def _from_draining(self, sequence: Sequence, source: TargetWorker, positions: int) -> Departure | None:
        destination = self._fleet.pick_target(sequence.tokens, positions, self._max_per_target)
        if destination is None:
            return None
        departure, _ = self._sooner(sequence, source, destination)
        full = departure.with_kv and self._moves.leaving(source) >= _MOST_FROM_DRAINING
        return None if full else departure

    def _from_crowded(self, sequence: Sequence, source: TargetWorker, positions: int) -> Departure | None:
        """One at a time: a sequence under way does not decode, and how much too many there are is seen anew each time.
        Prefill has no such end for the source to wait for, so the destination must have nothing else to prefill."""
        destination = self._fleet.pick_relief(source, positions)
        if destination is None or self._moves.leaving(source):
            return None
        departure, seconds = self._sooner(sequence, source, destination)
        if not departure.with_kv and destination.count(SequenceState.PREFILLING):
            return None
        return departure if seconds < self._seconds_saved(sequence, source, destination) else None

    def _sooner(self, sequence: Sequence, source: TargetWorker, destination: TargetWorker) -> tuple[Departure, float]:
        """With or without KV, as the configuration says or as is expected to be sooner; and the seconds it takes."""
        valid = source.kv[sequence.sequence_id].valid
        moving = self._controller.kv_moves.predict(1.0, valid)
        computing = self._computing_seconds(source, destination, valid)
        with_kv = self._moves.worth_it(valid, moving, computing)
        return Departure(destination, with_kv), moving if with_kv else computing

    def _computing_seconds(self, source: TargetWorker, destination: TargetWorker, positions: int) -> float:
        """What the destination takes to compute so much KV. One that has not computed yet is taken to be like the
        source."""
        cost = self._controller.target(destination).cost
        return (cost if cost.known else self._controller.target(source).cost).predict(1.0, positions)

    def _seconds_saved(self, sequence: Sequence, source: TargetWorker, destination: TargetWorker) -> float:
        """By so much sooner a sequence is expected to end on a destination that then has fewer batches.

        In each round of a sequence its target takes a step for each batch. A round yields at most one token more than
        are drafted. How many tokens are to come is not known: as many as came so far is a fair guess, up to the
        request's `max_tokens`.
        """
        tokens = min(sequence.end - sequence.length, sequence.length - len(sequence.request.prompt))
        rounds = tokens / (1 + sequence.planned_draft_length)
        batches = self._fleet.batches
        steps = batches(len(source.sequences)) - batches(len(destination.sequences) + 1)
        return rounds * steps * self._controller.target(source).typical
