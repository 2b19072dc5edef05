"""Weights of a plain checkpoint, rounded to few bits when they are loaded."""

from __future__ import annotations

import torch

from spool.engine.quantization.weights import QuantizedWeight

_GROUP = 32
_MIDDLE = 128
"""The code of 0 with 8 bits."""


def rounded(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """A weight `[out, in]` of a multiple of 32 inputs, to the nearest of 256 or 16 values in each group of 32.

    8 bits are symmetric around 0, 4 bits lie between the least and the largest number of the group. Scales and
    minimums are float16 numbers, unless that would move a value of the group by more than a quarter of a step: a
    group's numbers depend on nothing else, so that parts of a weight are rounded as the whole is.
    """
    groups = weight.float().unflatten(1, (-1, _GROUP))
    if bits == 8:
        steps = _MIDDLE - 1
        scales = groups.abs().amax(dim=-1) / steps
        minimums = torch.zeros_like(scales)
    else:
        steps = 2**bits - 1
        minimums = groups.amin(dim=-1)
        scales = groups.amax(dim=-1) / steps - minimums / steps
    short_scales, short_minimums = scales.half().float(), minimums.half().float()
    moved = steps * (short_scales - scales).abs() + (short_minimums - minimums).abs()
    fits = moved <= scales / 4
    scales, minimums = short_scales.where(fits, scales), short_minimums.where(fits, minimums)
    if bits == 8:
        minimums = -_MIDDLE * scales
    codes = (groups - minimums.unsqueeze(-1)).div_(scales.where(scales > 0, 1).unsqueeze(-1))
    codes = codes.round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    return QuantizedWeight.of_codes(codes.flatten(1), scales, minimums, bits)
