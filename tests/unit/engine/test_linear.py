"""Linear layers by kernel against torch's own, in float32, and against themselves at other row counts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from spool.engine.cpu.linear import KernelLinear, replace_linears
from tests.support.cpu_kernels import compiled_kernels


def plain_layers(inputs: int = 48, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 80), nn.Sequential(nn.SiLU(), nn.Linear(80, 40, bias=False))).to(dtype)


@pytest.mark.parametrize("inputs", [48, 47, 1])
def test_every_linear_layer_is_replaced_by_one_that_computes_the_same_at_every_row_count(inputs: int) -> None:
    plain = plain_layers(inputs)
    changed = copy.deepcopy(plain)
    replace_linears(changed, compiled_kernels())
    kinds = [type(module) for module in changed.modules()]
    assert (kinds.count(KernelLinear), kinds.count(nn.Linear)) == (2, 0)
    rows = torch.randn(1, 64, inputs).to(torch.bfloat16)
    with torch.inference_mode():
        together = changed(rows)
        torch.testing.assert_close(together.float(), plain.float()(rows.float()), rtol=0.03, atol=0.03)
        for count in range(1, 64):
            assert torch.equal(changed(rows[:, :count]), together[:, :count]), count


def test_kernels_of_another_dtype_leave_layers_as_they_are() -> None:
    layers = plain_layers(dtype=torch.float32)
    replace_linears(layers, compiled_kernels(torch.bfloat16))
    assert not any(isinstance(module, KernelLinear) for module in layers.modules())
