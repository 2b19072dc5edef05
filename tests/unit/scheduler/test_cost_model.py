"""What the controller learns of the costs of steps."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spool.scheduler.speculation.cost_model import LinearCost, MeanSeconds

GUESS = (1.0, 1 / 32, 1 / 32)
BASE, TOKEN, PREFILL = 0.015, 0.0007, 0.0005


def seconds(tokens: float, prefill: float = 0.0) -> float:
    return BASE + TOKEN * tokens + PREFILL * prefill


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("first", [True, False])
def test_steps_that_stall_count_for_next_to_nothing(first: bool, seed: int) -> None:
    """One in twenty takes twenty times as long; the first one may, when something is compiled."""
    cost, rng = LinearCost(GUESS), random.Random(seed)
    if first:
        cost.observe(20 * seconds(8), 1, 8)
    for step in range(100):
        tokens = rng.randrange(1, 40)
        cost.observe(seconds(tokens) * (20 if step % 20 == 7 else 1) * rng.uniform(0.95, 1.05), 1, tokens)
        if step >= 20:
            assert cost.predict(1, 20) == pytest.approx(seconds(20), rel=0.06)


def test_a_worker_that_has_become_twice_as_slow_is_noticed() -> None:
    cost, rng = LinearCost(GUESS), random.Random(3)
    for factor, steps in ((1, 200), (2, 50)):
        for _ in range(steps):
            tokens = rng.randrange(1, 40)
            cost.observe(factor * seconds(tokens) * rng.uniform(0.95, 1.05), 1, tokens)
    assert cost.predict(1, 20) == pytest.approx(2 * seconds(20), rel=0.2)


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, 0.0, -1.0, 1e-200, 1e200])
def test_a_mean_hardly_knows_of_stalls_and_follows_a_change(nonsense: float) -> None:
    mean = MeanSeconds()
    for step in range(100):
        mean.observe(1.0 if step % 20 == 0 else nonsense if step % 20 == 8 else 0.01)
    assert mean.seconds == pytest.approx(0.01, rel=0.06)
    for _ in range(100):
        mean.observe(0.02)
    assert mean.seconds == pytest.approx(0.02, rel=0.06)


@given(st.lists(st.tuples(st.floats(1e-5, 10), st.integers(0, 500), st.integers(0, 500)), max_size=60))
def test_no_coefficient_is_ever_negative_or_undefined(steps: list[tuple[float, int, int]]) -> None:
    cost = LinearCost(GUESS)
    for measured, tokens, prefill in steps:
        cost.observe(measured, 1, tokens, prefill)
    assert all(math.isfinite(coefficient) and coefficient >= 0 for coefficient in cost.coefficients)


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, 0.0, -1.0, 1e-200, 1e200])
def test_times_that_cannot_be_change_nothing(nonsense: float) -> None:
    cost = LinearCost(GUESS)
    cost.observe(0.5, 1, 3)
    before = list(cost.coefficients)
    cost.observe(nonsense, 1, 8)
    assert cost.coefficients == before
