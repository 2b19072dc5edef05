"""The kernel for GPUs is tried before it is used: one of other values, or none, leaves attention to matrix products."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
import torch

from engine.cuda.setup import GpuPasses, load_gpu_passes
from tests.support.triton_kernel import interpreted_attention

HEADS = (4, 2, 16)


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return interpreted_attention()


def load(caplog: pytest.LogCaptureFixture, dtype: torch.dtype = torch.float32) -> GpuPasses | None:
    caplog.set_level(logging.WARNING)
    return load_gpu_passes(dtype, torch.device("cpu"), HEADS, True, lambda message, fraction: None)


# The interpreter does not multiply bfloat16.
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_kernel_that_works_is_named(kernel: ModuleType, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    gpu = load(caplog, dtype)
    assert gpu is not None
    assert gpu.identity.startswith("triton 3.")
    assert not caplog.text


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
