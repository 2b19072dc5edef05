"""KV on its way from a draining target to another one, and whether moving it pays."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.config import KvMovement
from scheduler.cost_fit import CostFit
from scheduler.messages import MoveKv
from scheduler.sequence import Sequence
from scheduler.worker_book import TargetBook

MOST_MOVES = 4
"""Sequences that leave a target at the same time; the others go on decoding there until it is their turn."""

_PRIOR = (1.0, 0.001)


@dataclass(slots=True, eq=False)
class KvMove:
    """One sequence's KV on the way. `abandoned` once the sequence went another way: what arrives is not wanted then."""

    move_id: int
    sequence: Sequence
    source: TargetBook
    destination: TargetBook
    positions: int
    abandoned: bool = False


class MoveTimes:
    """Seconds to move KV: so much a move, so much a position. Nothing until the first was measured."""

    def __init__(self) -> None:
        self._fit = CostFit(0.0, _PRIOR)

    def observe(self, positions: int, seconds: float) -> None:
        self._fit.observe((1.0, positions), seconds)

    def predict(self, positions: int) -> float:
        return self._fit.predict((1.0, positions))


class KvMoves:
    """The moves that have not been answered."""

    def __init__(self, movement: KvMovement) -> None:
        self._movement = movement
        self._moves: dict[int, KvMove] = {}
        self._last_id = 0
        self.times = MoveTimes()

    def worth_it(self, positions: int, destination: TargetBook) -> bool:
        """Whether so many positions are to be moved there; else they are to be computed there."""
        if self._movement is KvMovement.AUTO:
            recompute = destination.times.predict(0, prefill_rows=positions)
            return positions > 0 and self.times.predict(positions) < recompute
        return positions > 0 and self._movement is KvMovement.ALWAYS

    def may_leave(self, source: TargetBook) -> bool:
        """Whether another sequence may begin to leave the target."""
        leaving = sum(move.source is source and not move.abandoned for move in self._moves.values())
        return leaving < MOST_MOVES

    def begin(self, sequence: Sequence, source: TargetBook, destination: TargetBook) -> MoveKv:
        """Books a move of what the source holds of the sequence, and returns the command for it."""
        positions = source.kv[sequence.sequence_id].valid
        self._last_id += 1
        move = KvMove(self._last_id, sequence, source, destination, positions)
        self._moves[move.move_id] = sequence.kv_move = move
        tokens = sequence.tokens
        return MoveKv(
            move.move_id,
            source.worker_id,
            destination.worker_id,
            tuple(tokens.tokens[:positions]),
            tokens.digest(positions),
            sequence.request,
        )

    def abandon(self, sequence: Sequence) -> None:
        """The sequence goes another way. What it was moved to keeps room for its KV until the move was answered."""
        move = sequence.kv_move
        if move is not None:
            move.abandoned = True
            sequence.kv_move = None
            move.destination.pages.reserve(_page_key(move), move.positions)

    def take_answered(self, move_id: int) -> KvMove | None:
        """The move that was answered, out of the books."""
        move = self._moves.pop(move_id, None)
        if move is not None and move.abandoned:
            move.destination.pages.release(_page_key(move))
        return move


def _page_key(move: KvMove) -> int:
    """Under which pages are set aside for KV that arrives for nobody; no sequence has a negative id."""
    return -move.move_id
