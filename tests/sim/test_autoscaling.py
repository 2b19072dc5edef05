"""The autoscaling policy over traces of load, in virtual time, on groups of replicas that take a while to start."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deploy.autoscaling.capacity import Goals
from deploy.autoscaling.decision import GroupRules, Rules
from tests.sim.replica_model import STEP, Cell, Costs, Moment

TOKEN_SECONDS = 0.05
UPSCALE, DOWNSCALE, START = 10.0, 60.0, 20.0
# From a rise of the load: it is seen for so long, then replicas start, then what has piled up is decoded.
REACTION = UPSCALE + START + 15.0


def rules(most_targets: int = 6, most_drafts: int = 3) -> Rules:
    pace = {"upscale_delay": UPSCALE, "downscale_delay": DOWNSCALE}
    targets, drafts = GroupRules(1, most_targets, **pace), GroupRules(1, most_drafts, **pace)  # type: ignore[arg-type]
    return Rules(targets, drafts, Goals(token_seconds=TOKEN_SECONDS))


def steps(*changes: tuple[float, int]) -> Callable[[float], int]:
    """The number that holds since the last of the times."""
    return lambda time: next(number for since, number in reversed(changes) if time >= since)


def held(moments: list[Moment], *rises: float) -> bool:
    """Whether 99 % of tokens take no longer than allowed, but for a time of reaction after each rise of the load."""
    calm = [one for one in moments if not any(rise <= one.time < rise + REACTION for rise in rises)]
    assert len(calm) > len(moments) / 4
    return sum(one.token_seconds > TOKEN_SECONDS for one in calm) <= len(calm) / 100


def test_clients_that_come_by_steps_and_go_again() -> None:
    rises = (0.0, 60.0, 120.0, 180.0)
    clients = steps((0, 1), (60, 4), (120, 16), (180, 64), (300, 16), (360, 4), (420, 1))
    cell = Cell(rules(), Costs(target_row=0.0008), clients=clients, start_seconds=START)
    moments = cell.run(640)
    assert held(moments, *rises)
    assert max(one.targets for one in moments if one.time < 300) >= 3
    assert (moments[-1].targets, moments[-1].drafts) == (1, 1)
    ups = [change for change in cell.target.changes if change[0] < 300]
    assert len(cell.target.changes) <= 7
    assert len(ups) <= 3
    numbers = [number for _, number in cell.target.changes]
    peak = numbers.index(max(numbers))
    assert numbers[: peak + 1] == sorted(numbers[: peak + 1])
    assert numbers[peak:] == sorted(numbers[peak:], reverse=True)


def test_no_load_asks_for_nothing() -> None:
    cell = Cell(rules(), Costs())
    cell.run(300)
    assert cell.target.changes == cell.draft.changes == []


def test_bursts_shorter_than_the_delays_move_nothing_up_and_down() -> None:
    cell = Cell(rules(), Costs(target_row=0.001), clients=lambda time: 60 if time % 45 < 4 else 2, tokens=20)
    cell.run(600)
    assert cell.target.changes == []


def test_bursts_that_last_are_served_without_going_down_between_them() -> None:
    cell = Cell(rules(), Costs(target_row=0.001), clients=lambda time: 60 if time % 45 < 20 else 2)
    moments = cell.run(600)
    assert held(moments, 0.0, 45.0)
    assert len(cell.target.changes) <= 2


@pytest.mark.parametrize("per_second", [4.0, 8.0, 12.0])
def test_arrivals_that_do_not_wait_for_answers_are_held_without_flapping(per_second: float) -> None:
    costs = Costs(target_base=0.03, target_row=0.0005)
    cell = Cell(rules(), costs, arrivals=lambda _: per_second, max_running=1024)
    moments = cell.run(900)
    assert held(moments, 0.0, 60.0)
    assert len([change for change in cell.target.changes if change[0] > 200]) <= 2
    # Not more than it takes: each target gives a token to this many sequences in the time allowed.
    least = per_second * 100 * TOKEN_SECONDS / 64
    assert moments[-1].targets <= max(1, round(least) + 2)


def test_a_growing_load_is_followed_before_it_is_too_much() -> None:
    costs = Costs(target_base=0.03, target_row=0.0005)
    cell = Cell(rules(), costs, arrivals=lambda time: min(12.0, time / 60), max_running=1024)
    moments = cell.run(1000)
    assert sum(one.token_seconds > TOKEN_SECONDS for one in moments) * STEP <= 30
    assert max(one.waiting for one in moments) <= 12


def test_what_the_laws_do_not_know_is_found_by_the_latency() -> None:
    clients = steps((0, 20))
    costs = Costs(target_row=0.001)
    slow = Costs(target_row=0.001, overhead=0.04)
    quick_cell, slow_cell = Cell(rules(), costs, clients=clients), Cell(rules(), slow, clients=clients)
    quick_cell.run(200)
    slow_cell.run(200)
    assert slow_cell.target.number > quick_cell.target.number


@pytest.mark.parametrize("overhead", [0.002, 0.016, 0.024])
@pytest.mark.parametrize(("agreement", "draft_length"), [(0.1, 0), (0.5, 2), (0.8, 4)])
def test_a_rise_asks_for_no_more_targets_than_hold_the_same_load_on_the_way_down(
    agreement: float, draft_length: int, overhead: float
) -> None:
    """Of steps that take nearly as long as a token may: 80 ms and 1 ms a row, of 100 ms."""
    costs = Costs(0.08, 0.001, 0.01, 0.002, overhead, batch_size=8, draft_length=draft_length)
    groups = [GroupRules(1, most, upscale_delay=UPSCALE, downscale_delay=20.0) for most in (32, 8)]
    clients = steps((0, 4), (120, 16), (420, 64), (720, 16))
    cell = Cell(
        Rules(*groups, Goals(token_seconds=0.1, draft_cost=0.25)),
        costs,
        clients=clients,
        acceptance=lambda _: agreement,
        tokens=200,
        start_seconds=START,
    )
    moments = cell.run(1100)
    asked = max(decision.target.wanted for time, decision in cell.decisions if 120 <= time < 420 and decision.target)
    assert asked <= 1.3 * moments[-1].targets
    # Nobody gets a target of its own.
    assert max(one.targets for one in moments) <= 64 / 4


SLOW_DRAFTS = Costs(target_base=0.03, target_row=0.0003, draft_pass=0.003, draft_row=0.0003, overhead=0.0)


def test_drafts_follow_the_load_in_a_ratio_and_are_fewer_than_targets() -> None:
    cell = Cell(rules(), SLOW_DRAFTS, clients=steps((0, 1), (30, 200)), acceptance=lambda _: 0.85)
    moments = cell.run(400)
    assert 2 <= moments[-1].drafts < moments[-1].targets
    for _, decision in cell.decisions:
        assert decision.draft is not None
        assert decision.target is not None
        assert decision.draft.wanted <= decision.target.wanted


def test_poor_acceptance_asks_for_fewer_drafts_and_never_for_more() -> None:
    falls = 200.0
    cell = Cell(rules(), SLOW_DRAFTS, clients=lambda _: 200, acceptance=lambda time: 0.85 if time < falls else 0.1)
    moments = cell.run(600)
    before = next(one for one in moments if one.time >= falls).drafts
    assert before >= 2
    assert all(one.drafts <= before for one in moments if one.time >= falls)
    assert moments[-1].drafts == 1
    assert moments[-1].targets >= 1


def test_acceptance_that_fades_never_raises_the_drafts() -> None:
    cell = Cell(rules(), SLOW_DRAFTS, clients=lambda _: 200, acceptance=lambda time: max(0.0, 0.9 - time / 1000))
    moments = cell.run(1000)
    settled = [one.drafts for one in moments if one.time > REACTION]
    assert settled == sorted(settled, reverse=True)
    assert settled[0] > settled[-1] == 1


def test_the_maximum_is_never_passed() -> None:
    cell = Cell(rules(most_targets=2, most_drafts=1), Costs(target_row=0.002), clients=lambda _: 100)
    moments = cell.run(200)
    assert moments[-1].targets == 2
    assert all(one.targets <= 2 and one.drafts <= 1 for one in moments)
