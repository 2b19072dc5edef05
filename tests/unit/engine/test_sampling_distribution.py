"""Drawn tokens follow the processed target distribution, and two models that share noise often draw the same token."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats

from spool.engine.sampling.context import SamplingContext
from spool.engine.sampling.sampler import sample_tokens
from spool.scheduler.sampling import SamplingParameters
from tests.support.distribution import distribution

HISTORY = (3, 3, 5, 7, 7, 7, 11, 2)
PROMPT_LENGTH = 3
LEAST_P_VALUE = 1e-4


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of the chi-square test; cells that expect fewer than five draws are put together."""
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed, wanted = list(counts[~rare]), list(expected[~rare])
    if expected[rare].sum() > 0:
        observed.append(counts[rare].sum())
        wanted.append(expected[rare].sum())
    if len(observed) < 2:
        return 1.0
    return float(stats.chisquare(observed, wanted).pvalue)


def counts_of(tokens: Sequence[int | None], size: int) -> np.ndarray:
    assert None not in tokens
    return np.bincount(np.array(tokens, dtype=np.int64), minlength=size)


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 3.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.5},
    {"temperature": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 1.0, "logit_bias": {0: 3.0, 4: -100.0}},
    {
        "temperature": 0.8,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "logit_bias": {1: 1.5},
        "top_p": 0.95,
        "top_k": 10,
    },
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_draws_follow_the_distribution(settings: dict[str, float]) -> None:
    draws, size = 3000, 30
    line = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 2
    rows = [
        SamplingContext(SamplingParameters(seed=seed, **settings), 8, HISTORY, PROMPT_LENGTH) for seed in range(draws)
    ]  # type: ignore[arg-type]
    counts = counts_of(sample_tokens(line.expand(draws, size), rows), size)
    assert p_value(counts, distribution(line.tolist(), rows[0].sampling, HISTORY, PROMPT_LENGTH)) > LEAST_P_VALUE


def test_draws_at_successive_positions_follow_the_distribution() -> None:
    """One seed, many positions: what one long sequence sees."""
    line = torch.randn(30, generator=torch.Generator().manual_seed(3))
    sampling = SamplingParameters(temperature=1.0, seed=77)
    rows = [SamplingContext(sampling, position, (), 0) for position in range(20_000)]
    tokens = sample_tokens(line.expand(len(rows), 30), rows)
    probabilities = distribution(line.tolist(), sampling, (), 0)
    assert p_value(counts_of(tokens, 30), probabilities) > LEAST_P_VALUE
    # Neighbours are independent: pairs follow the product.
    pairs = [first * 30 + second for first, second in zip(tokens[::2], tokens[1::2], strict=True)]  # type: ignore[operator]
    assert p_value(counts_of(pairs, 900), np.outer(probabilities, probabilities).ravel()) > LEAST_P_VALUE


@pytest.mark.parametrize("difference", [0.2, 1.0, 3.0])
def test_match_probability_has_its_lower_bound(difference: float) -> None:
    size, draws = 30, 10_000
    generator = torch.Generator().manual_seed(4)
    line = torch.randn(size, generator=generator) * 1.5
    other = line + torch.randn(size, generator=generator) * difference
    rows = [SamplingContext(SamplingParameters(temperature=1.0, seed=seed), 5, (), 0) for seed in range(draws)]
    ours = sample_tokens(line.expand(draws, size), rows)
    theirs = sample_tokens(other.expand(draws, size), rows)
    matches = sum(a == b for a, b in zip(ours, theirs, strict=True)) / draws
    distance = 0.5 * float((torch.softmax(line.double(), 0) - torch.softmax(other.double(), 0)).abs().sum())
    bound = (1 - distance) / (1 + distance)
    assert matches >= bound - 4 * math.sqrt(0.25 / draws)
    # Nor above what any coupling can reach.
    assert matches <= 1 - distance + 4 * math.sqrt(0.25 / draws)
