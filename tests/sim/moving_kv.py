"""KV on its way between model workers: pages set aside at the start, contents and answer at the end, or neither."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kv.pages import PageTable
from scheduler.messages import KvMoved, MoveKv
from scheduler.state.digests import DigestedTokens

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

_SECONDS = 0.002
_SECONDS_PER_POSITION = 0.0001
_FAILING = 0.1


class MovingKv:
    """Carries out the moves that a simulated core asks for; some of them fail."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def start(self, move: MoveKv) -> None:
        simulation, sequence_id = self._simulation, move.opening.sequence_id
        source, destination = simulation.seats.get(move.source_id), simulation.seats.get(move.destination_id)
        assert source is not None, "a move from a worker that is gone"
        assert destination is not None, "a move to a worker that is gone"
        assert source is not destination
        rows = [row for step in source.unanswered.values() for row in step.rows]
        assert sequence_id not in [row.sequence_id for row in rows], "moved while a row is in flight"
        held = source.worker.held.get(sequence_id)
        seconds = _SECONDS + _SECONDS_PER_POSITION * len(move.tokens) * simulation.random.uniform(0.5, 2)
        failing = simulation.random.random() < _FAILING
        whole = held is not None and list(held.tokens.tokens[: len(move.tokens)]) == list(move.tokens)
        assert whole or simulation.fault is not None, "the source does not hold what is to be moved"
        table = PageTable()
        pool = destination.worker.pool
        fits = pool.can_append(table, len(move.tokens))
        assert fits or not simulation.ample, "the destination has no room"
        if fits:
            pool.append(table, len(move.tokens))

        def end() -> None:
            known = source.worker.held.get(sequence_id)
            unchanged = known is not None and known.tokens.digest(min(len(known.tokens), len(move.tokens))) == (
                move.prefix_digest
            )
            arrived = (
                fits
                and not failing
                and source.alive
                and unchanged
                and destination.alive
                and destination.worker.adopt(sequence_id, DigestedTokens(move.tokens), table)
            )
            if not arrived:
                pool.free(table)
            simulation.at(
                simulation.now + simulation.latency,
                lambda: simulation.handle(KvMoved(move.move_id, arrived, seconds, len(move.tokens))),
            )

        simulation.at(simulation.now + simulation.latency + seconds, end)
