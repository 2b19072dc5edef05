"""Blocks of the types of GGUF as `QuantizedWeight`s: the same numbers to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from mmap import mmap

import numpy as np
import torch

from spool.engine.quantization.gguf_types import TYPES
from spool.engine.quantization.weights import QuantizedWeight, joined_weights

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Rows that are taken apart at a time, which bounds what lies beside the codes.
_ROWS = 2048

_Codes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes `[rows, in]`, scales and minimums `[rows, in / group]`."""


def tensor_of_blocks(
    content: mmap | bytes, kind: str, shape: tuple[int, ...], offset: int
) -> torch.Tensor | QuantizedWeight:
    """Of the bytes of a file from `offset` on, of a type of `TYPES`.

    Raises ValueError for scales that are not finite.
    """
    if kind in _FLOATS:
        dtype = _FLOATS[kind]
        raw = np.frombuffer(content, np.uint8, int(np.prod(shape)) * dtype.itemsize, offset)
        return torch.from_numpy(raw.copy()).view(dtype).view(shape)
    _, values, size, bits, group = TYPES[kind]
    out, inputs = shape
    raw = np.frombuffer(content, np.uint8, out * inputs // values * size, offset).reshape(out, -1, size)
    parts = []
    for first in range(0, out, _ROWS):
        codes, scales, minimums = _CODES[kind](torch.from_numpy(raw[first : first + _ROWS].copy()))
        if not (torch.isfinite(scales).all() and torch.isfinite(minimums).all()):
            raise ValueError("has a scale that is not finite")
        parts.append(QuantizedWeight.of_codes(codes, scales, minimums, bits, group))
    return joined_weights(parts)


def _q4_0(blocks: torch.Tensor) -> _Codes:
    scales = _halves(blocks[..., :2])
    return _nibbles(blocks[..., 2:], 16), scales, scales * -8


def _q4_1(blocks: torch.Tensor) -> _Codes:
    return _nibbles(blocks[..., 4:], 16), _halves(blocks[..., :2]), _halves(blocks[..., 2:4])


def _q5_0(blocks: torch.Tensor) -> _Codes:
    scales = _halves(blocks[..., :2])
    return _nibbles(blocks[..., 6:], 16) | _bits(blocks[..., 2:6]) << 4, scales, scales * -16


def _q5_1(blocks: torch.Tensor) -> _Codes:
    codes = _nibbles(blocks[..., 8:], 16) | _bits(blocks[..., 4:8]) << 4
    return codes, _halves(blocks[..., :2]), _halves(blocks[..., 2:4])


def _q8_0(blocks: torch.Tensor) -> _Codes:
    scales = _halves(blocks[..., :2])
    return (blocks[..., 2:] ^ 128).flatten(1), scales, scales * -128


def _q4_k(blocks: torch.Tensor) -> _Codes:
    return _nibbles(blocks[..., 16:], 32), *_k_scales(blocks)


def _q5_k(blocks: torch.Tensor) -> _Codes:
    upper = _shifted(blocks[..., 16:48], 32, range(8)) & 1
    return _nibbles(blocks[..., 48:], 32) | upper << 4, *_k_scales(blocks)


def _q6_k(blocks: torch.Tensor) -> _Codes:
    upper = _shifted(blocks[..., 128:192], 32, range(0, 8, 2)) & 3
    inner = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = (_halves(blocks[..., 208:]).unsqueeze(-1) * inner).flatten(1)
    return _nibbles(blocks[..., :128], 64) | upper << 4, scales, scales * -32


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of 8 groups, 6 bits each: those of the first four in a byte of their own, those of the last four in a half of
    another byte and the upper two bits of the first ones'."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    scale, minimum = _halves(blocks[..., :2]).unsqueeze(-1), _halves(blocks[..., 2:4]).unsqueeze(-1)
    return (scale * scales).flatten(1), (minimum * minimums).flatten(1).neg()


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    return pairs.contiguous().view(torch.float16).float().flatten(1)


def _nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """A byte's lower half belongs to one run of inputs, its upper half to the next one."""
    return _shifted(packed, run, (0, 4)) & 15


def _bits(packed: torch.Tensor) -> torch.Tensor:
    return _shifted(packed, 1, range(8)) & 1


def _shifted(packed: torch.Tensor, run: int, shifts: range | tuple[int, ...]) -> torch.Tensor:
    """Each run of bytes once for each of the shifts, one after the other."""
    runs = packed.reshape(packed.shape[0], -1, 1, run)
    return (runs >> torch.tensor(shifts, dtype=torch.uint8).unsqueeze(-1)).flatten(1)


_CODES: dict[str, Callable[[torch.Tensor], _Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""By the type's name: what takes blocks `[rows, blocks, bytes]` apart."""
