"""The fluid of a fleet: nobody is lost, laws of queues hold, and the same seed gives the same day."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from bench.fleet.cells import Cells, Lengths
from bench.fleet.check import Phase, compare
from bench.fleet.day import Day, Plan
from bench.fleet.demand import AZURE_CHAT, SERVEGEN_DAY, Demand
from bench.fleet.faults import NodeFault, SchedulerFault, ZoneLoss, draw
from bench.fleet.gateways import weights
from bench.fleet.replicas import Replicas
from bench.fleet.samples import percentiles
from bench.fleet.speeds import Load, Speeds, h100_pair, measure
from services.scheduler_client.cell_choice import BALANCE

LENGTHS = Lengths(1000.0, 200.0)
KV_TOKENS = 400_000


def load(sequences: float, tokens: float) -> Load:
    return Load(sequences, tokens, tokens / 2, tokens, tokens / 2, 0.9, 0.01, 0.006, 5e-5, 5e-4, 5e-5, 0.7)


SPEEDS = Speeds([load(1, 200.0), load(16, 2400.0), load(128, 5000.0)], 3e-5)
SMALL = Plan(cells=6, step=0.5, seconds=1800.0, zone_loss=ZoneLoss(1, 600.0, 300.0))


def day_of(plan: Plan, share: float = 0.5) -> Day:
    rate = share * plan.cells * plan.targets * SPEEDS.request_rate(plan.token_seconds, LENGTHS.prompt, LENGTHS.output)
    return Day(plan, SPEEDS, Demand(rate), LENGTHS, KV_TOKENS)


def settled(cells: Cells, rate: float, targets: float, seconds: float = 300.0, step: float = 0.1) -> None:
    for _ in range(round(seconds / step)):
        coming = np.full(1, rate * step)
        cells.arrive(coming, coming * LENGTHS.prompt)
        cells.advance(np.full(1, targets), step)


@pytest.mark.parametrize("rate", [2.0, 15.0, 40.0])
def test_at_steady_load_sequences_are_rate_times_time(rate: float) -> None:
    """Little's law, the times by hand: those of a prompt's chunks, then of the answer's tokens."""
    cells, targets = Cells(1, SPEEDS, LENGTHS), 8.0
    settled(cells, rate, targets)
    at = cells.decoding / targets
    prefill_seconds = LENGTHS.prompt / SPEEDS.prefill(at)
    speed = SPEEDS.of("tokens", at) * SPEEDS.slowed(np.full(1, rate * LENGTHS.prompt / targets))
    answer_seconds = LENGTHS.output * at / speed
    assert cells.sequences == pytest.approx(rate * (prefill_seconds + answer_seconds), rel=0.02)
    assert not cells.waiting.any()


def test_a_sequences_context_is_its_prompt_and_as_much_as_an_answer_has() -> None:
    """Exponential answers: what is done is as long, on average, as what is left."""
    cells = Cells(1, SPEEDS, LENGTHS)
    settled(cells, 15.0, 8.0)
    assert cells.context / cells.decoding == pytest.approx(LENGTHS.prompt + LENGTHS.output, rel=0.05)


def test_what_leaves_and_what_stays_are_all_there_were() -> None:
    cells = Cells(3, SPEEDS, LENGTHS)
    for _ in range(100):
        cells.arrive(np.array([5.0, 2.0, 1.0]), np.array([5000.0, 2000.0, 1000.0]))
        cells.advance(np.array([4.0, 8.0, 8.0]), 0.1)
    sequences, context = cells.sequences.copy(), cells.context.copy()
    tokens = (cells.waiting_tokens + cells.backlog + cells.context).copy()
    group = cells.release(np.array([1.0, 0.0, 0.0]))
    assert group.sequences == pytest.approx(sequences[0])
    assert (group.tokens, group.lost) == pytest.approx((tokens[0], context[0]))
    assert cells.sequences == pytest.approx([0.0, *sequences[1:]])
    lost = cells.lose_kv(np.array([0.0, 0.25, 0.0]))
    assert lost == pytest.approx([0.0, context[1] / 4, 0.0])
    assert cells.sequences == pytest.approx([0.0, *sequences[1:]])
    assert cells.waiting_tokens[1] + cells.backlog[1] + cells.context[1] == pytest.approx(tokens[1])


def test_a_cell_without_targets_keeps_its_queue() -> None:
    cells = Cells(1, SPEEDS, LENGTHS)
    cells.arrive(np.array([10.0]), np.array([10_000.0]))
    flow = cells.advance(np.zeros(1), 1.0)
    assert cells.waiting == pytest.approx([10.0])
    assert not flow.finished.any()
    assert np.isinf(flow.first_token).all()


def test_nobody_is_lost_with_the_zone() -> None:
    """`run` checks at each step that all who arrived have finished or are there."""
    day = day_of(SMALL)
    day.run()
    totals = day.totals
    assert totals.arrived == pytest.approx(totals.finished + day.open)
    assert totals.zone_resubmitted > 0
    assert totals.recomputed_tokens > totals.zone_resubmitted * LENGTHS.prompt / 2
    # No tokens of answers are lost either: those that have finished got them all.
    assert totals.committed_tokens == pytest.approx(totals.finished * LENGTHS.output)
    assert day.cells.waiting.sum() == pytest.approx(0.0, abs=1.0)
    without = [row["up"] for row in day.close_up.rows if 615 <= row["time"] <= 640]
    before = [row["up"] for row in day.close_up.rows if row["time"] < 600]
    assert max(without) < 0.75 * min(before)


def test_a_fleet_that_is_lost_as_a_whole_goes_on_later() -> None:
    day = day_of(replace(SMALL, zones=1, zone_loss=ZoneLoss(0, 300.0, 120.0), seconds=1200.0))
    day.run()
    assert day.totals.finished > 0.9 * day.totals.arrived
    waited = max(row["waiting"] for row in day.close_up.rows)
    assert waited > 0


def test_the_same_seed_gives_the_same_day() -> None:
    plan = replace(SMALL, seconds=400.0, zone_loss=ZoneLoss(0, 200.0, 60.0))
    first, second, other = day_of(plan), day_of(plan), day_of(replace(plan, seed=1))
    for day in (first, second, other):
        day.run()
    assert asdict(first.totals) == asdict(second.totals)
    assert first.day.rows == second.day.rows
    assert first.close_up.rows == second.close_up.rows
    assert first.totals.arrived != other.totals.arrived


def test_the_fluid_is_close_to_the_core_event_by_event() -> None:
    """A step of load on one target with a draft. Little is counted here: the record has more, and smaller errors."""
    hardware = h100_pair()
    speeds = Speeds([measure(hardware, number, 500, 1) for number in (1, 4, 8, 16, 32)], hardware.target.token)
    for found in compare(hardware, speeds, Lengths(400.0, 100.0), [Phase(12.0, 5.0), Phase(12.0, 12.0)], 1):
        assert abs(found.error["tokens/s"]) < 0.2
        assert abs(found.error["sequences"]) < 0.4
        assert abs(found.error["first token"]) < 0.4


def test_speeds_are_those_measured_and_straight_between() -> None:
    assert SPEEDS.of("tokens", np.array([0.0, 1.0, 16.0, 72.0, 500.0])) == pytest.approx([0, 200, 2400, 3700, 5000])
    assert SPEEDS.prefill(np.array([4.0])) == pytest.approx(512 / (0.01 + 512 * 3e-5))
    rate = SPEEDS.request_rate(0.008, 1000.0, 200.0)
    at = SPEEDS.sequences_at(rate, 1000.0, 200.0)
    assert at is not None
    assert at / (rate * 200.0) <= 0.008
    assert SPEEDS.sequences_at(1 / (1000.0 * 3e-5), 1000.0, 200.0) is None


def test_a_cells_load_is_bounded() -> None:
    sequences = np.array([100.0, 300.0, 0.0, 50.0])
    shares = weights(sequences, np.array([10.0, 10.0, 0.0, 10.0]))
    assert sequences[1] / 10 > BALANCE * 15
    assert shares == pytest.approx([0.5, 0.0, 0.0, 0.5])
    assert not weights(sequences, np.zeros(4)).any()


def test_replicas_start_late_and_only_where_there_are_gpus() -> None:
    replicas = Replicas(1, 4, 10, 120.0)
    replicas.ask(0, 20, 0.0)
    replicas.come_up(119.0)
    assert (replicas.up[0], replicas.starting[0]) == (4, 6)
    replicas.come_up(120.0)
    assert (replicas.up[0], replicas.starting[0]) == (10, 0)
    assert replicas.lose_node(0, 3, 130.0, 500.0) == pytest.approx(0.3)
    assert (replicas.up[0], replicas.starting[0]) == (7, 0)
    replicas.ask(0, 10, 500.0)
    assert replicas.starting[0] == 3
    replicas.ask(0, 5, 510.0)
    assert (replicas.up[0], replicas.starting[0]) == (5, 0)
    replicas.close(0)
    replicas.ask(0, 6, 520.0)
    assert (replicas.up[0], replicas.starting[0], replicas.asked_for[0]) == (0, 0, 0)
    replicas.open(0, 600.0)
    assert (replicas.starting[0], replicas.asked_for[0]) == (6, 6)


def test_nodes_hold_all_targets_of_a_cell() -> None:
    plan = Plan()
    assert plan.gpus == 10_000
    assert sum(plan.targets_of_node(node) for node in range(plan.nodes)) == plan.targets == 64


def test_faults_come_at_their_rates() -> None:
    rng = np.random.default_rng(0)
    faults = draw(rng, 125, 10, 8, 100 * 86_400.0)
    assert faults == sorted(faults, key=lambda fault: fault.time)
    nodes = sum(isinstance(fault, NodeFault) for fault in faults)
    schedulers = sum(isinstance(fault, SchedulerFault) for fault in faults)
    assert nodes == pytest.approx(100 * 10_000 * 419 / (54 * 16_384), rel=0.15)
    assert schedulers == pytest.approx(100 * 125 / 7, rel=0.1)


def test_demand_has_the_traces_shape() -> None:
    demand = Demand(1000.0)
    assert len(SERVEGEN_DAY) == 144
    busiest = SERVEGEN_DAY.index(max(SERVEGEN_DAY))
    assert demand.rate((busiest + 0.5) * 600) == pytest.approx(1000.0)
    assert demand.rate(31.5 * 600) == pytest.approx(1000.0 * SERVEGEN_DAY[31] / SERVEGEN_DAY[busiest])
    assert demand.rate(0.0) == demand.rate(300.0)
    assert AZURE_CHAT.prompt > AZURE_CHAT.output


def test_percentiles_are_weighted() -> None:
    values, counts = np.array([3.0, 1.0, np.inf, 2.0]), np.array([1.0, 98.0, 0.0, 1.0])
    assert percentiles(values, counts) == {"p50": 1.0, "p99": 2.0}
    assert percentiles(values, np.zeros(4)) == {"p50": 0.0, "p99": 0.0}
