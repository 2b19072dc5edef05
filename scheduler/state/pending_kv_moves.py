"""Moves of KV from one target to another, and whether a move is better than computing anew."""

from __future__ import annotations

from scheduler.config import KvMovement
from scheduler.messages import MoveKv
from scheduler.state.workers import KvMove, Sequence, TargetWorker


class KvMoves:
    """The moves that were not answered yet."""

    def __init__(self, movement: KvMovement) -> None:
        self._movement = movement
        self._moves: dict[int, KvMove] = {}
        self._last_id = 0

    def worth_it(self, positions: int, moving: float, computing: float) -> bool:
        """Whether to move so many positions, which takes `moving` seconds, instead of `computing` them anew."""
        if self._movement is KvMovement.AUTO:
            return positions > 0 and moving < computing
        return positions > 0 and self._movement is KvMovement.ALWAYS

    def leaving(self, source: TargetWorker) -> int:
        """Sequences whose KV is leaving the target now."""
        return sum(move.source is source and not move.abandoned for move in self._moves.values())

    def begin(self, sequence: Sequence, source: TargetWorker, destination: TargetWorker) -> MoveKv:
        """Records a move of the KV that the source holds of the sequence; returns the command for it."""
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
        """The sequence no longer needs the move. The destination keeps pages for its KV until the move was answered."""
        move = sequence.kv_move
        if move is not None:
            move.abandoned = True
            sequence.kv_move = None
            move.destination.pages.reserve(_page_key(move), move.positions)

    def take_answered(self, move_id: int) -> KvMove | None:
        """Removes and returns the move that was answered; None for an unknown one."""
        move = self._moves.pop(move_id, None)
        if move is not None and move.abandoned:
            move.destination.pages.release(_page_key(move))
            move.destination.changed = True
        return move


def _page_key(move: KvMove) -> int:
    """The key of pages that are reserved for KV which no sequence needs; no sequence has a negative id."""
    return -move.move_id
