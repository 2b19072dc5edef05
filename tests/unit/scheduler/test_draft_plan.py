"""Draft lengths by cost: the plan, and whether it is trusted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.costs.draft_plan import GAIN_TO_START, CatchUp, CellCosts, DraftPlan, StepCosts, best_plan
from scheduler.costs.plan_record import PlanRecord
from scheduler.costs.step_times import expected_commit

STEPS = StepCosts(base=0.010, per_token=0.0, draft_per_pass=0.001, draft_per_token=0.0)
FLAT = CellCosts(
    sequences=1,
    batch_size=8,
    max_num_batched_tokens=512,
    overhead=0.0,
    draft_overhead=0.0,
    targets_per_draft=1.0,
    shared=STEPS,
)


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("per_token", [0.0, 0.0005, 0.002])
def test_a_single_stream_gets_the_length_of_the_highest_rate(acceptance: float, per_token: float) -> None:
    """One sequence drafts, then is verified: the rate of each length is known in closed form."""
    costs = replace(FLAT, shared=replace(STEPS, per_token=per_token))
    rates = [
        expected_commit(acceptance, length) / (0.010 + per_token * (1 + length) + 0.001 * length) for length in range(9)
    ]
    plan = best_plan(costs, [(acceptance, 1)], 8)
    assert plan.plain_rate == pytest.approx(rates[0])
    assert plan.rate >= max(rates) / GAIN_TO_START
    assert rates[plan.length(acceptance)] == pytest.approx(plan.rate)


def test_nobody_drafts_without_a_draft_or_a_hope() -> None:
    assert best_plan(FLAT, [(0.9, 1)], 0).length(0.9) == 0
    assert best_plan(FLAT, [(0.0, 1)], 4).length(0.0) == 0


def test_steps_too_short_for_the_clock_still_give_a_plan() -> None:
    nothing = replace(FLAT, sequences=4, shared=replace(STEPS, base=0.0, draft_per_pass=0.0))
    plan = best_plan(nothing, [(0.1, 1), (0.9, 1)], 4)
    assert plan.rate >= plan.plain_rate > 0


def test_dear_rows_are_for_sequences_that_accept() -> None:
    costs = replace(FLAT, sequences=32, shared=replace(STEPS, per_token=0.002))
    plan = best_plan(costs, [(0.05, 1), (0.5, 1), (0.95, 1)], 4)
    lengths = [plan.length(acceptance) for acceptance in (0.05, 0.5, 0.95)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[2] > lengths[1]


def test_few_sequences_go_in_one_step_unless_halves_hide_the_draft() -> None:
    pair = replace(FLAT, sequences=8)
    assert best_plan(pair, [(0.0, 1)], 4).merged
    assert best_plan(pair, [(0.9, 1)], 4).merged
    steep = replace(pair, shared=replace(STEPS, base=0.002, per_token=0.0005, draft_per_pass=0.0015))
    plan = best_plan(steep, [(0.99, 1)], 4)
    assert plan.split
    assert plan.length(0.99) > 0


def test_where_cores_are_shared_the_cheaper_of_two_ways_is_taken() -> None:
    """Two groups: overlapped the draft is hidden, time-sliced it is not, but tokens cost less."""
    steps = replace(STEPS, per_token=0.001, draft_per_pass=0.006)
    pool = replace(FLAT, sequences=16, shared=steps)
    side_by_side = best_plan(replace(pool, exclusive=replace(steps, per_token=0.0009)), [(0.8, 1)], 4)
    assert side_by_side.length(0.8) > 0
    assert not side_by_side.time_sliced
    sliced = best_plan(replace(pool, exclusive=replace(steps, per_token=0.0002)), [(0.8, 1)], 4)
    assert sliced.length(0.8) > 0
    assert sliced.time_sliced
    assert sliced.rate > side_by_side.rate


def test_plain_decoding_uses_cores_that_are_shared() -> None:
    exclusive = replace(STEPS, base=0.005)
    plan = best_plan(replace(FLAT, exclusive=exclusive), [(0.0, 1)], 4)
    assert plan.time_sliced
    assert plan.plain_rate == pytest.approx(200.0)


def test_a_change_to_turns_must_repay_what_the_draft_has_to_catch_up() -> None:
    cell = replace(FLAT, exclusive=STEPS)
    for catch_up, pays in [
        (CatchUp(seconds=0.005, rounds=0, rounds_left=50), True),
        (CatchUp(seconds=0.5, rounds=0, rounds_left=50), False),
        (CatchUp(seconds=0.005, rounds=90, rounds_left=50), False),
        (CatchUp(seconds=0.005, rounds=200, rounds_left=50), False),
    ]:
        assert (best_plan(cell, [(0.4, 1)], 4, catch_up=catch_up).length(0.4) > 0) == pays


def test_so_must_a_change_to_drafting_beside_verification_on_shared_cores() -> None:
    """But not for time slicing that sequences wait for."""
    cell = replace(FLAT, sequences=16, exclusive=replace(STEPS, draft_per_pass=0.01))
    for catch_up, pays in [
        (CatchUp(seconds=0.01, rounds=0, rounds_left=50), True),
        (CatchUp(seconds=5.0, rounds=0, rounds_left=50), False),
        (CatchUp(seconds=0.01, rounds=90, rounds_left=50), True),
    ]:
        plan = best_plan(cell, [(0.7, 16)], 4, catch_up=catch_up)
        assert not (plan.time_sliced and plan.thresholds)
        assert (plan.length(0.7) > 0) == pays
        assert best_plan(cell, [(0.7, 16)], 4, speculating=True, catch_up=catch_up).length(0.7) > 0


def test_drafting_waits_for_a_crowd_that_decodes_cheaply_without_it() -> None:
    """Alone a sequence gains by drafts. Of sixteen in a step each token costs less than such a gain."""
    exclusive = replace(FLAT, batch_size=16, shared=replace(STEPS, per_token=0.002, draft_per_pass=0.002))
    crowd = replace(exclusive, sequences=16)
    assert best_plan(exclusive, [(0.7, 1)], 4).length(0.7) > 0
    assert best_plan(crowd, [(0.7, 16)], 4).length(0.7) == 0
    for speculating in (False, True):
        assert best_plan(replace(exclusive, coming=15), [(0.7, 16)], 4, speculating=speculating).length(0.7) == 0


def test_a_crowd_that_will_draft_is_no_reason_to_wait() -> None:
    exclusive = replace(FLAT, batch_size=16)
    assert best_plan(replace(exclusive, sequences=16), [(0.7, 16)], 4).length(0.7) > 0
    assert best_plan(replace(exclusive, coming=15), [(0.7, 16)], 4).length(0.7) > 0


@pytest.mark.parametrize("prompt_share", [0.0, 4.0, 40.0])
def test_prompts_are_work_for_both(prompt_share: float) -> None:
    """One sequence, time-sliced: every token brings some prompt, whose chunks need steps even without verification."""
    steps = replace(STEPS, per_prefill_token=0.0001, draft_per_prompt_token=0.0002)
    costs = replace(FLAT, exclusive=steps, shared=replace(steps, base=1.0), prompt_share=prompt_share, prefill_chunk=50)

    def rate(length: int) -> float:
        tokens = expected_commit(0.8, length)
        prompt = prompt_share * tokens
        drafting = 0.001 * length + 0.0002 * prompt if length else 0.0
        return tokens / (0.010 * max(1.0, prompt / 50) + 0.0001 * prompt + drafting)

    plan = best_plan(costs, [(0.8, 1)], 4)
    assert plan.plain_rate == pytest.approx(rate(0))
    assert rate(plan.length(0.8)) == pytest.approx(plan.rate)
    assert (plan.length(0.8) > 0) == (prompt_share < 40)


def test_a_draft_that_holds_up_a_large_pool_gets_full_steps() -> None:
    pool = replace(FLAT, sequences=32)
    assert best_plan(pool, [(0.9, 1)], 4).full_draft_step == 0
    slow = replace(pool, shared=replace(STEPS, draft_per_pass=0.008))
    assert best_plan(slow, [(0.9, 1)], 4).full_draft_step == 16


def test_speculation_that_is_not_trusted_must_promise_more() -> None:
    plan = best_plan(FLAT, [(0.4, 1)], 4)
    gain = plan.rate / plan.plain_rate
    assert plan.length(0.4) > 0
    assert best_plan(FLAT, [(0.4, 1)], 4, trust=0.98 / gain).length(0.4) == 0


def a_plan(speculating: bool, rate: float = 200.0) -> DraftPlan:
    return DraftPlan((0.5,) if speculating else (), True, False, False, 0.0, rate, 1.0, 0.01)


def stretch(record: PlanRecord, speculating: bool, came: float, stretches: int, started: int = 0) -> None:
    """Seconds in which `came` times the promised 200 tokens are chosen."""
    for second in range(started, started + stretches + 1):
        record.planned(a_plan(speculating), float(second), 8, round(200 * came * (second - started)), steady=True)


def test_plans_that_keep_their_promises_are_trusted() -> None:
    record = PlanRecord()
    assert record.trust == 1.0
    stretch(record, True, 1.0, 3)
    assert record.trust == 1.0
    stretch(record, True, 1.3, 9, started=10)
    assert record.trust == 1.0


def test_speculation_that_comes_out_slower_is_trusted_less_and_forgiven_in_time() -> None:
    record = PlanRecord()
    stretch(record, True, 0.8, 5)
    assert record.trust == pytest.approx(0.8, abs=0.01)
    stretch(record, False, 1.0, 60, started=10)
    assert record.trust == 1.0


def test_a_slow_machine_is_no_argument_against_speculation() -> None:
    record = PlanRecord()
    stretch(record, False, 0.8, 5)
    stretch(record, True, 0.8, 5, started=10)
    assert record.trust == pytest.approx(1.0, abs=0.01)


def test_the_way_into_speculation_is_not_held_against_it() -> None:
    record = PlanRecord()
    for _ in range(6):
        stretch(record, False, 1.0, 2)
        stretch(record, True, 0.2, 1, started=10)
    assert record.trust == 1.0


def test_unsteady_stretches_do_not_count() -> None:
    record = PlanRecord()
    for second in range(10):
        record.planned(a_plan(True), float(second), 8 + second % 2, 10 * second, steady=True)
        record.planned(a_plan(True), second + 0.5, 8, 10 * second, steady=False)
    assert record.trust == 1.0


def test_drafts_that_often_propose_nothing_cost_few_rows() -> None:
    """The same chance of a token asked for, out of fewer proposals: most of the rows are never sent."""
    dear = replace(FLAT, sequences=8, shared=replace(STEPS, per_token=0.003, draft_per_pass=0.0))
    assert best_plan(dear, [(0.3, 1)], 4).length(0.3) == 0
    assert best_plan(replace(dear, proposed_share=0.3), [(0.3, 1)], 4).length(0.3) > 0
