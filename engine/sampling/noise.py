"""Gumbel noise from a counter: a function of seed, position and token id, on every device and in every batch.

A row key is mixed from seed and absolute position on the host. A token's bits are SplitMix64's output function applied
to key + (id + 1) * golden ratio; its top 32 bits x give t = (x + 0.5) / 2^32 and g = -log(-log(1 - t)).
"""

from __future__ import annotations

import torch
from torch import Tensor

from spool.engine import ieee_math

_MASK_64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB

SMALLEST_GUMBEL = -3.13
LARGEST_GUMBEL = 22.874


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK_64
    return value - 2**64 if value >= 2**63 else value


_GOLDEN_SIGNED = _signed(GOLDEN)
_MULTIPLIER_1_SIGNED = _signed(MULTIPLIER_1)
_MULTIPLIER_2_SIGNED = _signed(MULTIPLIER_2)


def _mixed(value: int) -> int:
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & _MASK_64
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & _MASK_64
    return value ^ (value >> 31)


def row_key(seed: int, position: int) -> int:
    """The key of all noise at one position of one sequence, as an int64. Both arguments are in [0, 2^64)."""
    return _signed(_mixed(_mixed(seed + GOLDEN) + (position + 1) * GOLDEN))


def _xor_shifted(bits: Tensor, shift: int, scratch: Tensor) -> None:
    """bits ^= bits >>> shift, the logical shift made of an arithmetic one and a mask."""
    torch.bitwise_right_shift(bits, shift, out=scratch)
    scratch.bitwise_and_((1 << (64 - shift)) - 1)
    bits.bitwise_xor_(scratch)


def noise_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """The 64 random bits of each (key, token id), both int64, broadcast against each other; the top 32 are used."""
    bits = (token_ids + 1) * _GOLDEN_SIGNED + keys
    scratch = torch.empty_like(bits)
    _xor_shifted(bits, 30, scratch)
    bits.mul_(_MULTIPLIER_1_SIGNED)
    _xor_shifted(bits, 27, scratch)
    bits.mul_(_MULTIPLIER_2_SIGNED)
    return bits


def top_bits(bits: Tensor) -> Tensor:
    """The top 32 bits of int64 numbers, as int64 in [0, 2^32)."""
    return (bits >> 32) & 0xFFFFFFFF


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise, float32, in [SMALLEST_GUMBEL, LARGEST_GUMBEL], of each (key, token id); both int64, broadcast."""
    half_up = top_bits(noise_bits(keys, token_ids)).to(torch.float64) + 0.5
    remainder = 1.0 - half_up * 2.0**-32
    return (-ieee_math.log(-ieee_math.log(remainder))).to(torch.float32)
