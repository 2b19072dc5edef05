"""Requests that arrive whether or not a cell keeps up: against queueing theory, and against what a cache must find."""

from __future__ import annotations

import statistics

import pytest

from deploy.planning.open_loop import OpenLoop, figures, join_all
from deploy.planning.traffic import Lengths, PlannedRequest, SharedBeginning, drawn
from deploy.planning.virtual_cell import Costs
from scheduler.config import SchedulerConfig
from scheduler.messages import EmitTokens

COSTS = Costs(base=0.01, row=0.0, draft_base=0.001, draft_row=0.0, latency=0.0, jitter=0.0)
ALL = 10**6


def run(config: SchedulerConfig, costs: Costs, requests: list[PlannedRequest], drafts: int = 0) -> OpenLoop:
    cell = OpenLoop(config, costs, lambda _id, _position: 0.7, requests)
    join_all(cell, 1, drafts, ALL, ALL)
    cell.run_all()
    return cell


@pytest.mark.parametrize(("load", "number"), [(0.3, 2000), (0.6, 5000), (0.8, 12_000)])
def test_one_request_at_a_time_waits_as_long_as_in_an_m_d_1_queue(load: float, number: int) -> None:
    """Service takes 2 steps of 10 ms. Mean wait by Pollaczek and Khinchine: load · service / (2 · (1 - load))."""
    service, config = 0.02, SchedulerConfig(max_running=1, draft_length=0, max_queued_sequences=ALL)
    requests = drawn(load / service, number, Lengths(1, 0, 1), Lengths(2, 0, 2))
    waits = [one.first_token_seconds - 0.01 for one in run(config, COSTS, requests).times]
    assert statistics.fmean(waits) == pytest.approx(load * service / (2 * (1 - load)), rel=0.08)


def test_latencies_follow_from_the_costs() -> None:
    """A prompt of 40 tokens, 10 answers: by hand, with the wire, the scheduler's own time and the gateway's."""
    costs = Costs(
        base=0.01,
        row=0.0001,
        draft_base=1.0,
        draft_row=0.0,
        latency=0.002,
        jitter=0.0,
        kv=0.00001,
        scheduler_step=0.003,
        scheduler_row=0.001,
    )
    config = SchedulerConfig(draft_length=0)
    cell = OpenLoop(config, costs, lambda _id, _position: 0.0, [PlannedRequest(0.0, 40, 11)], gateway_seconds=0.005)
    join_all(cell, 1, 0, ALL, ALL)
    cell.run_all()
    (times,) = cell.times
    # What a step brings is told when the next one is on its way; the one after the last has no rows.
    scheduling, wires = 0.003 + 0.001, 2 * 0.002
    assert times.first == pytest.approx(0.005 + scheduling + wires + 0.01 + 40 * 0.0001 + scheduling + 0.005)
    reads = sum(range(40, 50)) * 0.00001
    assert times.last - times.first == pytest.approx(10 * (scheduling + wires + 0.0101) + reads - 0.001)
    assert times.tokens == 11
    assert figures([cell]).tokens_per_second == pytest.approx(11 / times.last)


def test_twice_the_rate_of_what_a_target_can_do_is_half_of_it_too_late() -> None:
    """Requests pile up; the figures say so, and none is lost."""
    config = SchedulerConfig(batch_size=4, max_running=4, draft_length=0, max_queued_sequences=ALL)
    requests = drawn(80.0, 1000, Lengths(1, 0, 1), Lengths(10, 0, 10))
    found = figures([run(config, COSTS, requests)])
    assert found.failed == 0
    assert found.tokens_per_second == pytest.approx(4 / 0.01, rel=0.02)
    assert not found.keeps(1.0, 1.0, 99)
    assert found.first_token["p99"] == pytest.approx(1000 / 80, rel=0.1)


def test_a_queue_that_is_full_refuses_and_that_is_counted() -> None:
    config = SchedulerConfig(batch_size=1, max_running=1, draft_length=0, max_queued_sequences=2)
    requests = [PlannedRequest(0.0, 1, 5) for _ in range(60)]
    found = figures([run(config, COSTS, requests)])
    assert found.failed == 57
    assert not found.keeps(1e9, 1e9, 99)


class Caching(OpenLoop):
    """Knows how many tokens of each prompt were found."""

    def __init__(self, *given: object, **more: object) -> None:
        super().__init__(*given, **more)  # type: ignore[arg-type]
        self.cached: dict[int, int] = {}

    def delivered(self, command: object) -> None:
        if isinstance(command, EmitTokens):
            self.cached.setdefault(command.sequence_id, command.cached)
        super().delivered(command)  # type: ignore[arg-type]


@pytest.mark.parametrize("drafts", [0, 1])
def test_prompts_that_begin_alike_are_computed_once(drafts: int) -> None:
    """Eight requests, one after the other: all but the first find the whole pages of what they share."""
    requests = [PlannedRequest(float(number), 330, 20, (1,), 200) for number in range(8)]
    config = SchedulerConfig(draft_length=4 if drafts else 0)
    costs = Costs(base=0.001, row=0.0001, draft_base=0.0002, draft_row=0.00001, jitter=0.0)
    cell = Caching(config, costs, lambda _id, _position: 0.7, requests)
    join_all(cell, 1, drafts, ALL, ALL)
    cell.run_all()
    assert cell.cached == {number: 192 if number else 0 for number in range(8)}
    first, *later = cell.times
    for one in later:
        # 192 tokens less, of 0.1 ms; two steps less, of 1 ms; and one round trip.
        assert first.first_token_seconds - one.first_token_seconds == pytest.approx(0.0192 + 0.002 + 0.001, abs=1e-4)


def test_what_a_small_cache_has_forgotten_is_computed_again() -> None:
    """Room for 30 pages: every second prompt of 20 pages drives out the other."""
    requests = [PlannedRequest(float(number), 320, 4, (number % 2,), 320) for number in range(6)]
    cell = Caching(SchedulerConfig(draft_length=0), COSTS, lambda _id, _position: 0.0, requests)
    join_all(cell, 1, 0, 30, ALL)
    cell.run_all()
    assert set(cell.cached.values()) == {0}


def test_shared_beginnings_make_the_first_token_sooner() -> None:
    lengths, output = Lengths(50, 0.5, 1000), Lengths(30, 0.5, 1000)
    costs = Costs(base=0.002, row=0.0002, draft_base=0.001, draft_row=0.0, jitter=0.02)
    config = SchedulerConfig(draft_length=0, max_queued_sequences=ALL)
    shared = figures([run(config, costs, drawn(4.0, 300, lengths, output, SharedBeginning(1.0, 3, 800)))])
    alone = figures([run(config, costs, drawn(4.0, 300, Lengths(850, 0.03, 2000), output))])
    assert shared.first_token["p50"] < 0.4 * alone.first_token["p50"]
