"""Logarithm, exponential, sine and cosine out of operations that IEEE 754 fixes to the last bit.

A library's functions differ between devices, and between the vector body and the tail of one loop. These do
not: every step is one elementwise addition, multiplication, division or bit operation, so equal inputs give equal bits
on any device, in any batch and with any number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LN2 = 0.6931471805599453
LOG2_E = 1 / _LN2
_SQRT_HALF = math.sqrt(0.5)

# log((1 + s) / (1 - s)) = 2 s (1 + s^2/3 + s^4/5 + ...); |s| <= 0.172, so the first term left out is below 2^-57.
_ATANH_SERIES = tuple(1 / (2 * k + 1) for k in range(11))
# ln(2) in two parts; a whole number below 2^13 times the first is exact in float32.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440054690583e-4
# e^r for |r| <= ln(2)/2: the first term left out is below 2^-25.
_EXP_SERIES = tuple(1 / math.factorial(k) for k in range(8))

# The same in float64: a whole number below 2^20 times the first is exact, and so are those times the first two parts of
# pi / 2.
_LN2_PARTS = 0.6931471803691238, 1.9082149292705877e-10
_HALF_PI_PARTS = 1.570796325802803, 9.920935791635221e-10, 5.170182981794105e-19
# For |r| <= ln(2)/2, and for |r| <= pi/4: the first term left out is below 2^-57.
_LONG_EXP_SERIES = tuple(1 / math.factorial(k) for k in range(15))
_SIN_SERIES = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(9))
_COS_SERIES = tuple((-1) ** k / math.factorial(2 * k) for k in range(10))

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
    return scale * _LN2 + (s + s) * _series(_ATANH_SERIES, s * s)


def power(base: float, exponents: Tensor) -> Tensor:
    """`base`, which is positive, to float64 exponents, within a few parts in 10^15; results below 2^1000."""
    x = exponents * log(torch.tensor(base, dtype=torch.float64))
    doublings = torch.round(x * LOG2_E)
    rest = (x - doublings * _LN2_PARTS[0]) - doublings * _LN2_PARTS[1]
    scale = ((doublings.to(torch.int64) + 1023) << 52).view(torch.float64)
    return _series(_LONG_EXP_SERIES, rest) * scale


def cos_sin(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of float64 numbers of magnitude below 2^22, within 2^-52."""
    quarters = torch.round(x * (2 / math.pi))
    high, middle, low = _HALF_PI_PARTS
    rest = ((x - quarters * high) - quarters * middle) - quarters * low
    square = rest * rest
    cos, sin = _series(_COS_SERIES, square), rest * _series(_SIN_SERIES, square)
    quarter = quarters.to(torch.int64) & 3
    cos, sin = torch.where(quarter % 2 == 1, sin, cos), torch.where(quarter % 2 == 1, cos, sin)
    return torch.where((quarter == 1) | (quarter == 2), -cos, cos), torch.where(quarter >= 2, -sin, sin)


def exp_of_negative(x: Tensor) -> Tensor:
    """e^-x of float32 numbers x >= 0, within a few parts in 10^7; 0 where x > 80."""
    bounded = x.clamp(max=-LOWEST_EXPONENT).neg_()
    halvings = torch.round(bounded * LOG2_E)
    rest = bounded.sub_(halvings * LN2_HIGH).sub_(halvings * LN2_LOW)
    series = _series(_EXP_SERIES, rest)
    scale = ((halvings.to(torch.int32) + _FLOAT32_BIAS) << _FLOAT32_MANTISSA_BITS).view(torch.float32)
    return torch.where(x > -LOWEST_EXPONENT, 0.0, series * scale)


def _series(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """The sum of coefficients times powers of x, the first times 1."""
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total.mul_(x).add_(coefficient)
    return total
