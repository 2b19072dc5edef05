"""What the core learns of costs and acceptance."""

from __future__ import annotations

import random

import pytest

from scheduler.costs.cost_fit import CostFit
from scheduler.costs.step_times import Acceptance, DraftTimes, PromptShare, TargetTimes, expected_commit

BASE, ROW, PREFILL = 0.015, 0.0007, 0.0005


def seconds_of(rows: int, prefill: int = 0) -> float:
    return BASE + ROW * rows + PREFILL * prefill


def test_before_anything_is_measured_the_initial_seconds_hold() -> None:
    times = TargetTimes(9.0)
    assert times.predict(100) == times.base == times.typical == 9.0
    assert times.per_token == 0.0
    assert not DraftTimes(9.0).known


def test_two_sizes_give_base_and_slope() -> None:
    times = TargetTimes(9.0)
    for rows in (8, 40, 8, 40):
        times.observe(rows, True, 0, seconds_of(rows))
    assert times.predict(60) == pytest.approx(seconds_of(60), rel=0.02)
    assert times.predict(1) == pytest.approx(seconds_of(1), rel=0.02)


def test_rows_and_prefill_are_told_apart() -> None:
    times = TargetTimes(9.0)
    for rows, prefill in ((8, 0), (40, 0), (8, 64), (24, 64), (40, 20)):
        times.observe(rows, True, prefill, seconds_of(rows, prefill))
    assert times.predict(16) == pytest.approx(seconds_of(16), rel=0.02)
    assert times.predict(16, prefill_tokens=100) == pytest.approx(seconds_of(16, 100), rel=0.03)


def test_prefill_of_any_context_leaves_the_law_of_verification_alone() -> None:
    """The attention of a chunk far into a long prompt takes as long as all the rest of the step."""
    times = TargetTimes(9.0)
    for context in range(20):
        times.observe(0, True, 96, seconds_of(0, 96) * (1 + context / 10))
        times.observe(1, True, 96, seconds_of(1, 96) * (2 + context / 5))
        times.observe(1, True, 0, seconds_of(1))
        times.observe(5, True, 0, seconds_of(5))
    assert times.base == pytest.approx(BASE, rel=0.02)
    assert times.per_token == pytest.approx(ROW, rel=0.05)


def test_what_rows_cost_is_guessed_from_steps_of_one_size() -> None:
    """Reading the weights is most of a step of few rows, whatever the machine."""
    times, slower = TargetTimes(9.0), TargetTimes(9.0)
    for _ in range(50):
        times.observe(1, True, 0, 0.008)
        slower.observe(1, True, 0, 0.8)
    assert 0.006 < times.base < 0.008
    assert slower.base == pytest.approx(100 * times.base)


@pytest.mark.parametrize("share", [0.05, 0.15])
def test_slow_steps_do_not_poison_the_law(share: float) -> None:
    rng = random.Random(3)
    times = TargetTimes(9.0)
    for _ in range(400):
        rows = 8 * (1 + rng.choice((0, 1, 2, 4)))
        slow = rng.uniform(5, 200) if rng.random() < share else 1.0
        times.observe(rows, False, 0, seconds_of(rows) * slow * rng.uniform(0.95, 1.05))
    for rows in (8, 24, 40):
        assert times.predict(rows, False) == pytest.approx(seconds_of(rows), rel=0.1)
    assert times.typical < 0.06


def test_a_first_step_that_compiles_is_forgotten_at_once() -> None:
    times = TargetTimes(0.05)
    times.observe(8, True, 0, 40.0)
    assert times.typical == 0.05
    for _ in range(5):
        times.observe(8, True, 0, 0.02)
    assert times.predict(8) == pytest.approx(0.02, rel=0.01)
    assert times.typical == 0.02


def test_the_slope_is_remembered_while_all_steps_have_one_size() -> None:
    times = TargetTimes(0.05)
    for rows in (8, 40, 16) * 3:
        times.observe(rows, True, 0, seconds_of(rows))
    for _ in range(5000):
        times.observe(8, True, 0, seconds_of(8))
    assert times.predict(40) == pytest.approx(seconds_of(40), rel=0.02)


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    times = TargetTimes(0.05)
    for rows in (8, 40, 16) * 20:
        times.observe(rows, True, 0, seconds_of(rows))
    for rows in (8, 40, 16) * 20:
        times.observe(rows, True, 0, 3 * seconds_of(rows))
    assert times.predict(24) == pytest.approx(3 * seconds_of(24), rel=0.05)


def test_more_rows_never_take_less_time() -> None:
    times = TargetTimes(0.05)
    for rows in (8, 80) * 4:
        times.observe(rows, True, 0, 0.2 if rows == 8 else 0.1)
    assert times.per_token == 0.0
    assert times.predict(1000) == times.predict(8)


def test_ragged_groups_cost_extra_where_they_do() -> None:
    free, dear = TargetTimes(0.05), TargetTimes(0.05)
    for rows in (8, 16, 24, 40):
        for equal in (True, False):
            free.observe(rows, equal, 0, seconds_of(rows))
            dear.observe(rows, equal, 0, seconds_of(rows) + (0.0 if equal else 0.01))
    assert free.ragged_extra == 0.0
    assert dear.ragged_extra == pytest.approx(0.01, rel=0.05)
    assert dear.predict(24, False) - dear.predict(24, True) == pytest.approx(0.01, rel=0.05)


def test_times_that_are_no_times_are_ignored() -> None:
    times = TargetTimes(0.02)
    for seconds in (float("nan"), float("inf"), -1.0):
        times.observe(8, True, 0, seconds)
    assert (times.typical, times.predict(8)) == (0.02, 0.02)


def test_a_draft_pays_for_passes_and_rows() -> None:
    times = DraftTimes(0.05)

    def took(passes: int, rows: int) -> float:
        return passes * (0.003 + 0.0002 * rows)

    for passes, rows in ((4, 8), (2, 8), (4, 3), (1, 8), (4, 16)):
        times.observe(passes, passes * rows, 0, took(passes, rows))
    assert times.predict(3, 3 * 10) == pytest.approx(took(3, 10), rel=0.03)
    assert times.base == pytest.approx(0.003, rel=0.05)


def test_catching_up_and_proposing_are_told_apart() -> None:
    times = DraftTimes(0.05)
    for rows in (1, 4, 16, 8):
        times.observe(4, 4 * rows, 2 * rows, 4 * (0.003 + 0.0002 * rows))
        times.observe(1, 0, 96, 0.006)
        times.observe(1, 0, 48, 0.0045)
    assert times.per_catch_up_token == pytest.approx(0.0015 / 48, rel=0.1)
    assert times.predict(4, 40) == pytest.approx(4 * (0.003 + 0.0002 * 10), rel=0.1)


def test_the_fit_keeps_few_bins_whatever_it_sees() -> None:
    rng = random.Random(1)
    fit = CostFit(1.0, (1.0, 1.0))
    for _ in range(3000):
        x = 10 ** rng.uniform(0, 9)
        fit.observe((1.0, x), 0.01 + 1e-6 * x)
    assert len(fit._bins) <= 64
    assert fit.predict((1.0, 1e8)) == pytest.approx(100.01, rel=0.02)


def test_acceptance_counts_the_tokens_that_were_tried() -> None:
    acceptance = Acceptance()
    for _ in range(2000):
        acceptance.observe(3, 4)  # three taken, the fourth refused
        acceptance.observe(0, 0)
    assert acceptance.rate == pytest.approx(0.75, abs=0.01)
    assert expected_commit(1.0, 4) == 5
    assert expected_commit(0.0, 4) == 1
    assert expected_commit(0.5, 2) == pytest.approx(1.75)


def test_what_fades_still_outweighs_a_few_tokens() -> None:
    acceptance = Acceptance()
    for _ in range(1000):
        acceptance.observe(0, 1)
    for _ in range(100_000):
        acceptance.fade(0.999)
    assert acceptance.rate < 0.05
    acceptance.observe(1, 1)
    acceptance.observe(1, 1)
    assert acceptance.rate < 0.25
    for _ in range(40):
        acceptance.observe(1, 1)
    assert acceptance.rate > 0.7


def test_the_prompts_of_sequences_that_end_are_known_per_token_of_output() -> None:
    prompts = PromptShare()
    assert prompts.rate == 0
    prompts.observe(400, 100)
    assert prompts.rate == 4
    for _ in range(500):
        prompts.observe(20, 100)
    assert prompts.rate == pytest.approx(0.2)


def test_steps_alone_and_beside_others_share_what_both_tell() -> None:
    exclusive = TargetTimes(0.05)
    shared = TargetTimes(0.05, exclusive)
    for rows in (1, 4, 8, 16, 32, 40):
        exclusive.observe(rows, True, 0, 0.015 + 0.0004 * rows)
    # Of cores that two share each has half: nobody should have to see that first.
    assert 1.3 * exclusive.predict(8) < shared.predict(8) < 2 * exclusive.predict(8)
    for rows in (1, 4, 8, 16, 32, 40):
        shared.observe(rows, True, 0, 0.017 + 0.0009 * rows)
    assert exclusive.predict(24) == pytest.approx(0.015 + 0.0004 * 24, rel=0.03)
    assert shared.predict(24) == pytest.approx(0.017 + 0.0009 * 24, rel=0.03)
    assert shared.per_token == pytest.approx(0.0009, rel=0.1)
