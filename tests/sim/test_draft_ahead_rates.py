"""Drafting ahead, in virtual time, with the costs of two pairs of models on GPUs of their own."""

from __future__ import annotations

import pytest

from bench.draft_ahead.laws import AGREEMENTS, BATCH_SIZES, LAWS, LONGEST, OUTCOMES, rate

# One estimate and the luck of some hundred rounds.
_NEVER_LESS = 0.98


@pytest.mark.sampled(3)
@pytest.mark.parametrize("agreement", AGREEMENTS)
@pytest.mark.parametrize("law", LAWS)
def test_a_stream_gains_a_third_over_the_best_fixed_length(law: str, agreement: float) -> None:
    ordinary = max(rate(LAWS[law], agreement, draft_length=length).rate for length in range(1, LONGEST + 1))
    ahead = rate(LAWS[law], agreement, outcomes=OUTCOMES)
    assert ahead.rate >= 1.3 * ordinary
    assert ahead.snapshot.outcomes_found >= 0.6 * ahead.snapshot.outcomes_sought > 0


@pytest.mark.sampled(5)
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
@pytest.mark.parametrize("agreement", AGREEMENTS)
@pytest.mark.parametrize("law", LAWS)
def test_a_batch_never_loses(law: str, agreement: float, batch_size: int) -> None:
    without = rate(LAWS[law], agreement, batch_size=batch_size).rate
    assert rate(LAWS[law], agreement, batch_size=batch_size, outcomes=OUTCOMES).rate >= _NEVER_LESS * without


def test_nothing_is_prepared_where_the_target_has_another_batch_to_verify() -> None:
    costs = LAWS["8B, 0.6B"]
    assert rate(costs, 0.7, batch_size=4, batches=2, outcomes=OUTCOMES).snapshot.outcomes_sought == 0
