"""How close a kernel's result must come to the same mathematics in float64."""

from __future__ import annotations

import torch

HALF_BITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-6}
"""The most that rounding to a dtype changes a number by, as a share of it; of float32, what some sums change it by."""


def assert_rounds(result: torch.Tensor, exact: torch.Tensor, floor: float = 0.0, slack: float = 1.02) -> None:
    """`result` is `exact` rounded to its dtype, but for what float32 did on the way. Numbers below `floor` keep the
    errors of the parts that cancelled."""
    allowed = exact.abs().clamp(min=floor) * HALF_BITS[result.dtype] * slack + 1e-6
    assert bool(((result.double() - exact).abs() <= allowed).all())


def exact_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    rows = rows.double()
    return rows / (rows.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()
