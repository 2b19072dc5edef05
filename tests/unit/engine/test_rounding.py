"""Weights rounded to few bits against plain arithmetic in float64."""

import numpy as np
import pytest
import torch

from spool.engine.quantization.rounding import rounded

GROUP = 32
RANDOM = torch.randn(6, 96, generator=torch.Generator().manual_seed(1))
EPSILON = 2.0**-22
"""Relative to the largest number of a group, of sums and products in float32."""


def constant() -> torch.Tensor:
    return torch.tensor([0.0, 0.1, -3.3, 1000.7])[:, None].expand(4, 64)


WEIGHTS = {
    "random": RANDOM,
    "bfloat16": RANDOM.bfloat16(),
    "constant": constant(),
    "far from 0": 100 + RANDOM / 1000,
    "small": RANDOM * 1e-4,
    "tiny": RANDOM * 1e-9,
    "huge": RANDOM * 1e30,
    "mixed": torch.cat([RANDOM, RANDOM * 1e-9, RANDOM * 1e9]),
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_each_number_becomes_the_nearest_one_and_steps_are_no_wider_than_they_must_be(kind: str, bits: int) -> None:
    weight = WEIGHTS[kind]
    result = rounded(weight, bits)
    assert (result.bits, result.group, result.shape) == (bits, GROUP, tuple(weight.shape))
    groups = weight.double().numpy().reshape(-1, GROUP)
    found = result.expanded().double().numpy().reshape(-1, GROUP)
    largest = np.abs(groups).max(axis=1)
    step = largest / 127 if bits == 8 else (groups.max(axis=1) - groups.min(axis=1)) / 15
    off = np.abs(found - groups)
    # Half a step, and a quarter for rounding scale and minimum.
    assert (off <= (0.75 * step + EPSILON * largest)[:, None]).all()
    scales, minimums = (part.double().numpy().reshape(-1, 1, 1) for part in (result.scales, result.minimums))
    choices = scales * np.arange(2**bits) + minimums
    nearest = np.abs(choices - groups[:, :, None]).min(axis=-1)
    assert (off <= nearest + 2 * EPSILON * largest[:, None]).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_and_minimums_of_ordinary_weights_are_float16_numbers(bits: int) -> None:
    result = rounded(torch.cat([RANDOM, torch.zeros(2, 96)]), bits)
    assert torch.equal(result.scales.half().float(), result.scales)
    assert torch.equal(result.minimums.half().float(), result.minimums)
