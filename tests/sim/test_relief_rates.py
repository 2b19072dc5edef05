"""A target that joins a saturated one: how much faster the cell becomes, on known costs, with sequences that go on."""

from __future__ import annotations

import pytest

from bench.virtual_time.rates import CPU, FLAT, STEEP, Costs, RateSimulation
from scheduler.config import KvMovement, Policy, SchedulerConfig
from scheduler.messages import Role
from scheduler.state.workers import TargetWorker
from scheduler.transitions.departures import Departures

SEQUENCES, BATCH = 64, 32


def gain(costs: Costs, kv_movement: KvMovement, drafts: int, within: float) -> tuple[float, RateSimulation]:
    """Tokens per second from so many seconds after the second target has joined, relative to before."""
    config = SchedulerConfig(batch_size=BATCH, max_running=SEQUENCES, policy=Policy.AUTO, kv_movement=kv_movement)
    simulation = RateSimulation(config, costs, lambda _id, _position: 0.7)
    simulation.join("one", Role.TARGET)
    for place in range(drafts):
        simulation.join(f"draft{place}", Role.DRAFT)
    for sequence_id in range(SEQUENCES):
        simulation.submit(sequence_id, 100, None)

    def rate(tokens: int) -> float:
        began, before = simulation.now, simulation.emitted_tokens
        simulation.run(lambda: simulation.emitted_tokens >= before + tokens)
        return (simulation.emitted_tokens - before) / (simulation.now - began)

    rate(SEQUENCES * 100)
    before = rate(SEQUENCES * 40)
    simulation.join("two", Role.TARGET)
    settled = simulation.now + within
    simulation.run(lambda: simulation.now >= settled)
    return rate(SEQUENCES * 40) / before, simulation


@pytest.mark.parametrize(
    ("costs", "kv_movement", "drafts", "within"),
    [
        (CPU, KvMovement.AUTO, 0, 5.0),
        (CPU, KvMovement.AUTO, 1, 5.0),
        (STEEP, KvMovement.ALWAYS, 0, 12.0),
        (FLAT, KvMovement.AUTO, 0, 3.0),
        (CPU, KvMovement.NEVER, 0, 30.0),
    ],
)
def test_a_second_target_makes_a_saturated_cell_faster(
    costs: Costs, kv_movement: KvMovement, drafts: int, within: float
) -> None:
    faster, simulation = gain(costs, kv_movement, drafts, within)
    assert faster > 1.6
    snapshot = simulation.core.snapshot()
    assert [worker.sequences for worker in snapshot.workers if worker.role is Role.TARGET] == [32, 32]
    assert snapshot.moves.moves + snapshot.moves.rehomed == 32


def test_without_moving_sequences_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def draining(_: Departures, source: TargetWorker) -> bool:
        return source.draining

    monkeypatch.setattr(Departures, "possible", draining)
    faster, simulation = gain(CPU, KvMovement.AUTO, 0, 5.0)
    assert 0.95 < faster < 1.05
    assert simulation.workers["two"].busy_seconds == 0
