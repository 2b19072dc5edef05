"""Rotary positions beside transformers' own, and sines beside those of the C library."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spool.engine import ieee_math
from spool.engine.layers.description import Rotation
from spool.engine.layers.rotation import RotationTable, inverse_frequencies

# Of float32.
STEP = 2.0**-23
LONG = {"short_factor": [1.0 + 0.01 * i for i in range(40)], "long_factor": [2.0 + 0.3 * i for i in range(40)]}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
ORIGINAL = {"original_max_position_embeddings": 2048}
KINDS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 1_000_000.0},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 24, **ORIGINAL},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25, "truncate": False, **ORIGINAL},
    {"rope_type": "longrope", "factor": 4.0, **LONG, **ORIGINAL},
    {"rope_type": "longrope", "attention_factor": 1.1, **LONG, **ORIGINAL},
    {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
]


@pytest.mark.parametrize("size", [80, 128])
@pytest.mark.parametrize("rope", KINDS, ids=lambda rope: "-".join(map(str, rope.values()))[:40])
@pytest.mark.parametrize("longest", [None, 1024, 16384])
def test_frequencies_are_those_of_transformers(rope: dict[str, Any], size: int, longest: int | None) -> None:
    if rope["rope_type"] == "longrope":
        rope = rope | {name: rope[name][: size // 2] + [3.0] * (size // 2 - 40) for name in LONG}
    config = LlamaConfig(head_dim=size, max_position_embeddings=8192, rope_parameters={"rope_theta": 10_000.0} | rope)
    frequencies, scaling = inverse_frequencies(config.rope_parameters, size, 8192, longest)
    of_kind = ROPE_INIT_FUNCTIONS.get(rope["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters)
    expected, expected_scaling = of_kind(config, torch.device("cpu"), seq_len=longest or 8192)
    torch.testing.assert_close(frequencies, expected, rtol=8 * STEP, atol=0)
    assert scaling == pytest.approx(expected_scaling, rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tables_are_those_of_transformers(dtype: torch.dtype) -> None:
    config = LlamaConfig(head_dim=64, rope_parameters={"rope_theta": 10_000.0} | KINDS[6])
    rotary = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 7, 1023, 1024, 5000, 131_071])
    scalings = torch.full((32,), rotary.attention_scaling)
    cos, sin = RotationTable(Rotation(rotary.inv_freq, scalings, dtype)).of(positions, 131_072)
    expected_cos, expected_sin = rotary(torch.empty(0, dtype=dtype), positions[None])
    signs = torch.tensor([-1.0] * 32 + [1.0] * 32)
    tolerance = 2.0**-8 if dtype == torch.bfloat16 else 4 * STEP
    torch.testing.assert_close(cos[:, 0], expected_cos[0].float(), rtol=0, atol=tolerance)
    torch.testing.assert_close(sin[:, 0], expected_sin[0].float() * signs, rtol=0, atol=tolerance)


def test_sines_are_those_of_the_c_library() -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.rand(3000, generator=generator, dtype=torch.float64) * torch.tensor([3.0, 3e3, 4e6]).repeat(1000)
    near_zeros = torch.arange(1000, dtype=torch.float64) * (math.pi / 2)
    x = torch.cat((numbers, -numbers, near_zeros))
    cos, sin = ieee_math.cos_sin(x)
    for found, function in ((cos, math.cos), (sin, math.sin)):
        expected = torch.tensor([function(number) for number in x.tolist()], dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=0, atol=2.0**-52)


@pytest.mark.parametrize("base", [1.5, 10_000.0, 1e9])
def test_powers_are_those_of_the_c_library(base: float) -> None:
    exponents = torch.linspace(-2, 3, 501, dtype=torch.float64)
    expected = torch.tensor([base**exponent for exponent in exponents.tolist()], dtype=torch.float64)
    torch.testing.assert_close(ieee_math.power(base, exponents), expected, rtol=2e-14, atol=0)
