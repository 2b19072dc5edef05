"""Noise against an oracle in plain Python, and its independence of everything but seed, position and token id."""

import math
import random

import pytest
import torch

from spool.engine import ieee_math
from spool.engine.sampling.noise import (
    GOLDEN,
    LARGEST_GUMBEL,
    MULTIPLIER_1,
    MULTIPLIER_2,
    SMALLEST_GUMBEL,
    gumbel,
    noise_bits,
    row_key,
    top_bits,
)

M64 = 2**64 - 1


def oracle_bits(seed: int, position: int, token: int) -> int:
    def stir(value: int) -> int:
        value = ((value ^ (value >> 30)) * MULTIPLIER_1) & M64
        return ((value ^ (value >> 27)) * MULTIPLIER_2) & M64

    def mix(value: int) -> int:
        value = stir(value & M64)
        return value ^ (value >> 31)

    key = mix(mix((seed + GOLDEN) & M64) + (position + 1) * GOLDEN)
    return stir((key + (token + 1) * GOLDEN) & M64) >> 32


def oracle_gumbel(bits: int) -> float:
    return -math.log(-math.log1p(-(bits + 0.5) / 2**32))


CASES = [(0, 0), (1, 0), (0, 1), (2**63, 12345), (M64, 8191), (123456789, 2**31)]


@pytest.mark.parametrize(("seed", "position"), CASES)
def test_bits_and_noise_match_the_oracle(seed: int, position: int) -> None:
    tokens = [0, 1, 2, 49151, 151935, 262143, *random.Random(seed).sample(range(200_000), 500)]
    keys = torch.tensor([row_key(seed, position)])
    ids = torch.tensor(tokens)
    expected = [oracle_bits(seed, position, token) for token in tokens]
    assert top_bits(noise_bits(keys, ids)).tolist() == expected
    reference = torch.tensor([oracle_gumbel(bits) for bits in expected], dtype=torch.float64)
    torch.testing.assert_close(gumbel(keys, ids).double(), reference, rtol=1e-6, atol=1e-6)


def test_bits_of_splitmix64() -> None:
    """The first outputs of SplitMix64 seeded with 0, whose last step leaves the top 31 bits alone."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    ours = top_bits(noise_bits(torch.tensor([0]), torch.arange(3))).tolist()
    assert [bits >> 1 for bits in ours] == [bits >> 33 for bits in published]


def test_noise_is_gumbel() -> None:
    # The margin by which engine.sampling discards tokens rests on this ratio.
    assert SMALLEST_GUMBEL < oracle_gumbel(2**32 - 1) < oracle_gumbel(0) < LARGEST_GUMBEL
    assert -math.log1p(-(2**32 - 0.5) / 2**32) < LARGEST_GUMBEL
    scipy_stats = pytest.importorskip("scipy.stats")
    draws = gumbel(torch.tensor([row_key(11, 4)]), torch.arange(200_000)).double().numpy()
    assert scipy_stats.kstest(draws, "gumbel_r").pvalue > 1e-3
    # One token at many positions, one at many seeds: no less independent.
    for keys in ([row_key(11, position) for position in range(50_000)], [row_key(seed, 4) for seed in range(50_000)]):
        draws = gumbel(torch.tensor(keys), torch.tensor(42)).double().numpy()
        assert scipy_stats.kstest(draws, "gumbel_r").pvalue > 1e-3


def test_logarithm() -> None:
    x = torch.cat([torch.rand(20_000, dtype=torch.float64) * scale for scale in (1e-9, 1e-3, 1, 30)])
    x = torch.cat([x[x > 0], torch.tensor([1.0, 0.5, 2.0, math.sqrt(0.5), math.sqrt(2), 1 - 2**-33]).double()])
    expected = torch.tensor([math.log(value) for value in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(ieee_math.log(x), expected, rtol=1e-15, atol=1e-18)


def test_exponential() -> None:
    x = torch.cat([torch.rand(20_000) * 80, torch.rand(20_000), torch.zeros(1)])
    expected = torch.tensor([math.exp(-value) for value in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(ieee_math.exp_of_negative(x).double(), expected, rtol=3e-7, atol=0)
    assert ieee_math.exp_of_negative(torch.tensor([0.0, 80.5, 1e30, math.inf])).tolist() == [1, 0, 0, 0]
