"""Rotary positions, out of operations that give the same bits on every processor: a library's powers and sines do not
(engine/ieee_math.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from spool.engine import ieee_math
from spool.engine.attention.paged_step import signed_rotation
from spool.engine.layers.description import Rotation

_Frequencies = tuple[Tensor, float]


def inverse_frequencies(rope: Mapping[str, Any], size: int, positions: int, longest: int | None) -> _Frequencies:
    """Radians a position, float32 `[size / 2]`, and what cosines and sines are multiplied by, as transformers defines
    them for each kind of scaling (modeling_rope_utils.py), of a configuration's `rope` and `positions`. `longest`: of
    the sequences that are served, where that is not all positions. Raises KeyError for a kind that is not known."""
    return _KINDS[rope["rope_type"]](rope, size, positions, longest or positions)


def _plain(rope: Mapping[str, Any], size: int, positions: int, longest: int) -> _Frequencies:
    return 1.0 / _wavelengths(rope["rope_theta"], size), 1.0


def _linear(rope: Mapping[str, Any], size: int, positions: int, longest: int) -> _Frequencies:
    return 1.0 / _wavelengths(rope["rope_theta"], size) / rope["factor"], 1.0


def _proportional(rope: Mapping[str, Any], size: int, positions: int, longest: int) -> _Frequencies:
    rotated = int(rope.get("partial_rotary_factor", 1.0) * size // 2)
    frequencies = 1.0 / _wavelengths(rope["rope_theta"], size) / rope.get("factor", 1.0)
    frequencies[rotated:] = 0
    return frequencies, 1.0


def _dynamic(rope: Mapping[str, Any], size: int, positions: int, longest: int) -> _Frequencies:
    factor = rope["factor"]
    growth = factor * max(longest, positions) / positions - (factor - 1)
    return 1.0 / _wavelengths(rope["rope_theta"] * _power(growth, size / (size - 2)), size), 1.0


def _yarn(rope: Mapping[str, Any], size: int, positions: int, longest: int) -> _Frequencies:
    """arXiv 2309.00071, section 3."""
    base, original = rope["rope_theta"], rope["original_max_position_embeddings"]
    factor = rope["factor"] or positions / original

    def attention_scale(share: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * share * _log(factor) + 1.0

    def place(rotations: float) -> float:
        """The frequency that turns so often within the original length."""
        return size * _log(original / (rotations * 2 * math.pi)) / (2 * _log(base))

    scaling, share, of_all = rope.get("attention_factor"), rope.get("mscale"), rope.get("mscale_all_dim")
    if scaling is None and share and of_all:
        scaling = attention_scale(share) / attention_scale(of_all)
    elif scaling is None:
        scaling = attention_scale(1)
    low, high = place(rope.get("beta_fast") or 32), place(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 if low == high else 0
    interpolated = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = _wavelengths(base, size)
    kept = 1 - interpolated
    return 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept, scaling


def _longrope(rope: Mapping[str, Any], size: int, positions: int, longest: int) -> _Frequencies:
    """arXiv 2402.13753."""
    original, scaling = rope["original_max_position_embeddings"], rope.get("attention_factor")
    factor = rope.get("factor") or positions / original
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + _log(factor) / _log(original))
    factors = rope["long_factor" if longest > original else "short_factor"]
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _wavelengths(rope["rope_theta"], size)), scaling


def _llama3(rope: Mapping[str, Any], size: int, positions: int, longest: int) -> _Frequencies:
    frequencies, _ = _plain(rope, size, positions, longest)
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original, lengths = rope["original_max_position_embeddings"], 2 * math.pi / frequencies
    smooth = (original / lengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(lengths > original / low, frequencies / factor, between)
    return torch.where(lengths < original / high, frequencies, scaled), 1.0


_KINDS: Mapping[str, Callable[[Mapping[str, Any], int, int, int], _Frequencies]] = {
    "default": _plain,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}


def _wavelengths(base: float, size: int) -> Tensor:
    """Positions a radian, each the whole number's power of the base, float32 `[size / 2]`."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    return ieee_math.power(base, exponents.double()).float()


def _power(base: float, exponent: float) -> float:
    return float(ieee_math.power(base, torch.tensor(exponent, dtype=torch.float64)))


def _log(x: float) -> float:
    return float(ieee_math.log(torch.tensor(x, dtype=torch.float64)))


class RotationTable:
    """The rotation of each position, computed once: a pass over few rows is short beside it."""

    _POSITIONS = 1024

    def __init__(self, rotation: Rotation) -> None:
        self._rotation = rotation
        self._cos, self._sin = self._computed(0)

    @property
    def described(self) -> tuple[object, ...]:
        rotation = self._rotation
        scalings = rotation.scalings.tolist()
        scaling = scalings[0] if len(set(scalings)) == 1 else scalings
        return (rotation.frequencies.tolist(), scaling, str(rotation.dtype))

    def of(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """The `signed_rotation` of positions (int64 `[rows]`) below `longest`."""
        if longest > (count := len(self._cos)):
            # Doubled, as all of it is copied.
            more = range(count, 2 ** (longest - 1).bit_length(), self._POSITIONS)
            cos, sin = zip((self._cos, self._sin), *map(self._computed, more), strict=True)
            self._cos, self._sin = torch.cat(cos), torch.cat(sin)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _computed(self, first: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(first, first + self._POSITIONS, dtype=torch.float32)
        angles = positions[:, None] * self._rotation.frequencies
        cos, sin = (
            (part.float() * self._rotation.scalings).to(self._rotation.dtype).repeat(1, 2)
            for part in ieee_math.cos_sin(angles.double())
        )
        return signed_rotation((cos[None], sin[None]))
