"""Layers with prepacked weights against torch's own linear, in float32, and against themselves at other row counts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from spool.engine.cpu.linear import KernelLinear, PrepackedLinear, can_prepack, prepack_linears
from tests.support.cpu_kernels import NEEDS_ONEDNN_BF16, compiled_kernels


def plain_layers(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 80), nn.Sequential(nn.SiLU(), nn.Linear(80, 40, bias=False))).to(dtype)


@pytest.mark.parametrize("kind", [PrepackedLinear, KernelLinear])
def test_every_linear_layer_is_replaced_by_one_that_computes_the_same_at_every_row_count(kind: type[nn.Module]) -> None:
    kernels = compiled_kernels() if kind is KernelLinear else None
    if not can_prepack(torch.zeros(2, 2, dtype=torch.bfloat16), kernels):
        pytest.skip(NEEDS_ONEDNN_BF16)
    plain = plain_layers()
    changed = copy.deepcopy(plain)
    prepack_linears(changed, kernels)
    kinds = [type(module) for module in changed.modules()]
    assert (kinds.count(kind), kinds.count(nn.Linear)) == (2, 0)
    rows = torch.randn(1, 64, 48).to(torch.bfloat16)
    with torch.inference_mode():
        together = changed(rows)
        torch.testing.assert_close(together.float(), plain.float()(rows.float()), rtol=0.03, atol=0.03)
        for count in range(2, 64):
            assert torch.equal(changed(rows[:, :count]), together[:, :count]), count


def test_kernels_of_another_dtype_leave_layers_as_they_are() -> None:
    layers = plain_layers(torch.float32)
    prepack_linears(layers, compiled_kernels(torch.bfloat16))
    assert not any(isinstance(module, PrepackedLinear | KernelLinear) for module in layers.modules())
