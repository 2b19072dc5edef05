"""The kernel for GPUs is tried before it is used: one of other values, or none, leaves attention to matrix products."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from engine.cuda.setup import GpuPasses, load_gpu_passes
from tests.support.tiny_models import tiny_model
from tests.support.triton_kernel import interpreted, interpreted_attention, multiply_in_one_order

HEADS = (4, 2, 16)


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return interpreted_attention()


def load(caplog: pytest.LogCaptureFixture, dtype: torch.dtype = torch.float32) -> GpuPasses | None:
    caplog.set_level(logging.WARNING)
    return load_gpu_passes(dtype, torch.device("cpu"), HEADS, True, lambda message, fraction: None)


@pytest.mark.parametrize(("dtype", "products"), [(torch.float16, "own products"), (torch.float32, "torch's products")])
def test_kernels_that_work_are_named(
    kernel: ModuleType,
    dtype: torch.dtype,
    products: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    multiply_in_one_order(monkeypatch)
    gpu = load(caplog, dtype)
    assert gpu is not None
    assert gpu.identity.startswith("triton 3.")
    assert gpu.identity.endswith(products)
    assert not caplog.text


def linear_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is nn.Linear]


def test_products_are_of_own_kernels_in_any_family(kernel: ModuleType) -> None:
    products = interpreted("engine.cuda.triton_product")
    backend = kernel.TritonBackend(*HEADS[:2], 16, torch.device("cpu"))
    gpu = GpuPasses("test", lambda page_size: backend, None, products.TritonLinear)
    for family in ("llama", "glm4"):
        model = tiny_model(family).to(torch.float16)
        assert linear_layers(model)
        gpu.fuse_decoder(model)
        gpu.replace_linears(model)
        assert linear_layers(model) == []


@pytest.mark.parametrize(("error", "rows"), [(0.05, range(301)), (0.002, range(17, 18))])
def test_products_of_other_values_or_bits_are_not_used(
    kernel: ModuleType,
    error: float,
    rows: range,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    multiply_in_one_order(monkeypatch)
    products = interpreted("engine.cuda.triton_product")
    forward = products.TritonLinear.forward

    def off(self: nn.Module, given: torch.Tensor) -> torch.Tensor:
        output = forward(self, given).clone()
        output[-1] += error if len(given) in rows else 0.0
        return output

    monkeypatch.setattr(products.TritonLinear, "forward", off)
    gpu = load(caplog, torch.float16)
    assert gpu is not None
    assert gpu.identity.endswith("torch's products")
    assert "products by torch's libraries, as their Triton kernel gives" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "error", "last_rows"),
    [(torch.float32, 0.1, 50), (torch.float32, 0.001, 50), (torch.float16, 0.02, 50), (torch.float32, 0.1, 1)],
)
def test_a_kernel_of_other_values_is_not_used(
    kernel: ModuleType,
    dtype: torch.dtype,
    error: float,
    last_rows: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever they are: the last row alone sees positions far from the first."""
    attend = kernel.TritonPlan.attend

    def off(*given: object) -> torch.Tensor:
        output = attend(*given).clone()
        output[-last_rows:] += error
        return output

    monkeypatch.setattr(kernel.TritonPlan, "attend", off)
    assert load(caplog, dtype) is None
    assert "its Triton kernel gives values that are" in caplog.text


def test_without_triton_there_are_products(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert load(caplog) is None
    assert "cannot be made: " in caplog.text
