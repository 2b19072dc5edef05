"""Which tokens are likeliest to be sampled, with the noise known."""

from __future__ import annotations

import math

import pytest
import torch

from engine.sampling.noise import gumbel, row_key
from engine.sampling.ranking import RankedTokens, ranked_tokens
from engine.sampling.sampler import SamplingContext
from scheduler.sampling import SamplingParameters

GREEDY = SamplingParameters()


def context(sampling: SamplingParameters, position: int = 9) -> SamplingContext:
    return SamplingContext(sampling, position, [1] * position, 4)


def ranked(logits: torch.Tensor, *rows: SamplingContext, asked: int | None, count: int) -> list[RankedTokens]:
    found = ranked_tokens(logits, rows, [asked] * len(rows), count)
    return [row for row in found if row is not None]


@pytest.mark.parametrize("vocabulary_size", [3, 127, 128, 129, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_tokens_come_by_their_ids(vocabulary_size: int, dtype: torch.dtype) -> None:
    """Logits of few values: nearly all tokens are equal to others, within and across buckets."""
    generator = torch.Generator().manual_seed(vocabulary_size)
    logits = torch.randint(0, 3, (4, vocabulary_size), generator=generator).to(dtype)
    for count in (1, 2, 7, 200):
        for line, row in zip(
            logits.tolist(), ranked(logits, *[context(GREEDY)] * 4, asked=2, count=count), strict=True
        ):
            order = sorted(range(vocabulary_size), key=lambda token: (-line[token], token))
            assert [token for token, _ in row.likeliest] == [token for token in order if token != 2][:count]


def test_shares_are_those_of_the_scores_with_their_noise() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2)) * 3
    sampling = [SamplingParameters(temperature=0.7, seed=seed) for seed in (1, 2, 3)]
    rows = [context(one, position) for position, one in enumerate(sampling, 5)]
    for line, row, found in zip(logits, rows, ranked(logits, *rows, asked=17, count=500), strict=True):
        noise = gumbel(torch.tensor(row_key(row.sampling.seed, row.position)), torch.arange(500))
        shares = (line.double() / 0.7 + noise.double()).softmax(0)
        assert found.share == pytest.approx(float(shares[17]), rel=1e-3)
        assert len(found.likeliest) == 499
        for token, share in found.likeliest:
            assert share == pytest.approx(float(shares[token]), rel=1e-3, abs=1e-9)


def test_tokens_without_a_column_have_no_share() -> None:
    names = torch.tensor([3, 5, 9])
    logits = torch.tensor([[1.0, 2.0, 0.0]])
    for asked, share in ((5, 0.665), (4, 0.0), (90, 0.0), (0, 0.0), (None, 0.0)):
        (row,) = ranked_tokens(logits, [context(GREEDY)], [asked], 3, names)
        assert row is not None
        assert row.share == pytest.approx(share, abs=1e-3)
        assert [token for token, _ in row.likeliest] == [token for token in (5, 3, 9) if token != asked]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParameters(temperature=1.0, top_p=0.5)])
def test_a_row_that_is_not_finite_is_none(bad: float, sampling: SamplingParameters) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    logits[2] = -math.inf
    found = ranked_tokens(logits, [context(sampling)] * 3, [1] * 3, 2)
    assert [row is None for row in found] == [False, True, True]
