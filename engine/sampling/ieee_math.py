"""Logarithm and exponential out of operations that IEEE 754 fixes to the last bit.

A library's `log` and `exp` differ between devices, and between the vector body and the tail of one loop. These do
not: every step is one elementwise addition, multiplication, division or bit operation, so equal inputs give equal bits
on any device, in any batch and with any number of threads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LN2 = math.log(2)
LOG2_E = 1 / _LN2
_SQRT_HALF = math.sqrt(0.5)

# log((1 + s) / (1 - s)) = 2 s (1 + s^2/3 + s^4/5 + ...); |s| <= 0.172, so the first term left out is below 2^-57.
_ATANH_SERIES = tuple(1 / (2 * k + 1) for k in range(11))
# ln(2) in two parts; a whole number below 2^13 times the first is exact in float32.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440054690583e-4
# e^r for |r| <= ln(2)/2: the first term left out is below 2^-25.
_EXP_SERIES = tuple(1 / math.factorial(k) for k in range(8))

_FLOAT32_MANTISSA_BITS = 23
_FLOAT32_BIAS = 127
LOWEST_EXPONENT = -80.0


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive, normal float64 numbers, within 2 units in the last place."""
    mantissa, exponent = torch.frexp(x)
    low = mantissa < _SQRT_HALF
    mantissa = torch.where(low, mantissa + mantissa, mantissa)
    scale = exponent.to(torch.float64) - low.to(torch.float64)
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = torch.full_like(square, _ATANH_SERIES[-1])
    for coefficient in reversed(_ATANH_SERIES[:-1]):
        series.mul_(square).add_(coefficient)
    return scale * _LN2 + (s + s) * series


def exp_of_negative(x: Tensor) -> Tensor:
    """e^-x of float32 numbers x >= 0, within a few parts in 10^7; 0 where x > 80."""
    bounded = x.clamp(max=-LOWEST_EXPONENT).neg_()
    halvings = torch.round(bounded * LOG2_E)
    rest = bounded.sub_(halvings * LN2_HIGH).sub_(halvings * LN2_LOW)
    series = torch.full_like(rest, _EXP_SERIES[-1])
    for coefficient in reversed(_EXP_SERIES[:-1]):
        series.mul_(rest).add_(coefficient)
    power = ((halvings.to(torch.int32) + _FLOAT32_BIAS) << _FLOAT32_MANTISSA_BITS).view(torch.float32)
    return torch.where(x > -LOWEST_EXPONENT, 0.0, series * power)
