"""Layers with prepacked weights against torch's own linear, in float32, and against themselves at other row counts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from engine.cpu.kernels import CpuKernels
from engine.cpu.linear import KernelLinear, PrepackedLinear, can_prepack, prepack_linears
from tests.support.cpu_kernels import NEEDS_ONEDNN_BF16, compiled_kernels


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(48, 80), nn.Sequential(nn.SiLU(), nn.Linear(80, 40, bias=False)))
    return layers.to(dtype)


def plain_and_prepacked(dtype: torch.dtype, kernels: CpuKernels | None) -> tuple[nn.Sequential, nn.Sequential]:
    plain = model(dtype)
    changed = copy.deepcopy(plain)
    prepack_linears(changed, kernels)
    return plain, changed


@pytest.fixture(params=[PrepackedLinear, KernelLinear])
def bfloat16_pair(request: pytest.FixtureRequest) -> tuple[nn.Sequential, nn.Sequential]:
    kernels = compiled_kernels() if request.param is KernelLinear else None
    weight = torch.zeros(2, 2, dtype=torch.bfloat16)
    if not can_prepack(weight, kernels):
        pytest.skip(NEEDS_ONEDNN_BF16)
    plain, changed = plain_and_prepacked(torch.bfloat16, kernels)
    assert isinstance(changed[0], request.param)
    return plain, changed


def test_prepacked_layers_compute_what_the_plain_ones_do(bfloat16_pair: tuple[nn.Sequential, nn.Sequential]) -> None:
    plain, changed = bfloat16_pair
    rows = torch.randn(3, 11, 48).to(torch.bfloat16)
    with torch.inference_mode():
        expected = copy.deepcopy(plain).float()(rows.float())
        torch.testing.assert_close(changed(rows).float(), expected, rtol=0.03, atol=0.03)


def test_every_linear_layer_is_replaced_however_deep(bfloat16_pair: tuple[nn.Sequential, nn.Sequential]) -> None:
    _, changed = bfloat16_pair
    kinds = [type(module) for module in changed.modules()]
    assert kinds.count(PrepackedLinear) + kinds.count(KernelLinear) == 2
    assert nn.Linear not in kinds


def test_a_row_keeps_its_bits_at_every_row_count(bfloat16_pair: tuple[nn.Sequential, nn.Sequential]) -> None:
    layer = bfloat16_pair[1][0]
    rows = torch.randn(1, 64, 48).to(torch.bfloat16)
    with torch.inference_mode():
        together = layer(rows)
        for count in range(2, 64):
            assert torch.equal(layer(rows[:, :count]), together[:, :count]), count


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_of_another_dtype_leave_layers_as_they_are(dtype: torch.dtype) -> None:
    _, changed = plain_and_prepacked(dtype, compiled_kernels(torch.bfloat16))
    assert not any(isinstance(module, PrepackedLinear | KernelLinear) for module in changed.modules())
    _, changed = plain_and_prepacked(dtype, compiled_kernels(dtype))
    assert sum(isinstance(module, KernelLinear) for module in changed.modules()) == 2
