"""Sampling parameters: every limit is included, and what is just beyond it is refused by name."""

from __future__ import annotations

import pytest

from scheduler.sampling import SamplingParameters

LAST_TOKEN = 2_147_483_647


@pytest.mark.parametrize(
    ("field", "included", "beyond"),
    [
        ("temperature", (0, 100), (-0.001, 100.001)),
        ("top_k", (0, LAST_TOKEN), (-1, LAST_TOKEN + 1)),
        ("top_p", (1e-9, 1), (0, 1.001)),
        ("min_p", (0, 1), (-0.001, 1.001)),
        ("repetition_penalty", (1e-9, 100), (0, 100.001)),
        ("presence_penalty", (-2, 2), (-2.001, 2.001)),
        ("frequency_penalty", (-2, 2), (-2.001, 2.001)),
        ("seed", (0, 18_446_744_073_709_551_615), (-1, 18_446_744_073_709_551_616)),
        ("min_tokens", (0, LAST_TOKEN), (-1, LAST_TOKEN + 1)),
    ],
)
def test_numbers(field: str, included: tuple[float, float], beyond: tuple[float, float]) -> None:
    for value in included:
        assert getattr(SamplingParameters(**{field: value}), field) == value  # type: ignore[arg-type]
    for value in beyond:
        with pytest.raises(ValueError, match=f"^{field} is {value!r}, must be "):
            SamplingParameters(**{field: value})  # type: ignore[arg-type]


def test_tokens() -> None:
    ends = frozenset({0, LAST_TOKEN})
    biases = {0: -100.0, LAST_TOKEN: 100.0}
    given = SamplingParameters(end_token_ids=ends, bad_words=((0, LAST_TOKEN),), logit_bias=biases)
    assert (given.end_token_ids, given.bad_words, given.logit_bias) == (ends, ((0, LAST_TOKEN),), biases)
    for token in (-1, LAST_TOKEN + 1):
        with pytest.raises(ValueError, match=f"^end_token_ids holds {token}, "):
            SamplingParameters(end_token_ids=frozenset({token}))
        with pytest.raises(ValueError, match=r"^bad_words holds "):
            SamplingParameters(bad_words=((5,), (5, token)))
        with pytest.raises(ValueError, match=rf"^logit_bias\[{token}\] is 1.0, "):
            SamplingParameters(logit_bias={token: 1.0})
    with pytest.raises(ValueError, match=r"^bad_words holds "):
        SamplingParameters(bad_words=((),))
    for bias in (-100.001, 100.001, float("nan")):
        with pytest.raises(ValueError, match=r"^logit_bias\[3\] is "):
            SamplingParameters(logit_bias={3: bias})
