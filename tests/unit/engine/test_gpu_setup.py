"""GPU kernels are tried before they are used. Without attention nothing is served; products of other values or bits
leave their work to torch."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from spool.engine.attention.backends import AttentionRule
from spool.engine.cuda.setup import GpuPasses, load_gpu_passes, multiplies_codes
from spool.engine.errors import UnsupportedProcessorError
from spool.engine.models.kernels import logits_scan
from spool.engine.models.loaded_model import LoadedModel
from spool.engine.models.vocabulary import Vocabulary
from spool.engine.passes.device import host_buffer, pinned
from spool.engine.sampling.logits_scan import LogitsScan
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, tiny_model
from tests.support.triton_kernel import interpreted, interpreted_attention, multiply_in_one_order

HEADS = (4, 2, 16)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = interpreted_attention()
    multiply_in_one_order(monkeypatch)
    return module


def load(
    caplog: pytest.LogCaptureFixture,
    dtype: torch.dtype = torch.float32,
    has_rules: bool = False,
    heads: tuple[int, int, int] = HEADS,
    quantized_kv: bool = False,
) -> GpuPasses:
    caplog.set_level(logging.WARNING)
    device = torch.device("cpu")
    return load_gpu_passes(dtype, device, heads, True, lambda message, fraction: None, has_rules, quantized_kv)


def linear_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is nn.Linear]


@pytest.mark.usefixtures("kernel")
def test_kernels_that_work_are_used_in_any_family(caplog: pytest.LogCaptureFixture) -> None:
    gpu = load(caplog, torch.float16)
    assert gpu.identity.startswith("triton 3.")
    assert gpu.identity.endswith("own products")
    assert not caplog.text
    for family in ("llama", "glm4"):
        model = tiny_model(family).to(torch.float16)
        assert linear_layers(model)
        gpu.fuse_decoder(model)
        gpu.replace_linears(model)
        assert linear_layers(model) == []


@pytest.mark.usefixtures("kernel")
@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("error", "rows"), [(0.05, range(301)), (0.002, range(17, 18))])
def test_products_of_other_values_or_bits_are_not_used(
    error: float, rows: range, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = interpreted("spool.engine.cuda.triton_product")
    forward = products.TritonLinear.forward

    def off(self: nn.Module, given: torch.Tensor) -> torch.Tensor:
        output = forward(self, given).clone()
        output[-1] += error if len(given) in rows else 0.0
        return output

    monkeypatch.setattr(products.TritonLinear, "forward", off)
    gpu = load(caplog, torch.float16)
    assert gpu.identity.endswith("torch's products")
    assert "products by torch's libraries, as their Triton kernel gives" in caplog.text
    assert not multiplies_codes(torch.float16, torch.device("cpu"))
    assert "quantised weights are expanded, as their Triton kernel gives" in caplog.text


# The last row alone sees positions far from the first.
@pytest.mark.parametrize(("error", "last_rows"), [(0.001, 50), (0.1, 1)])
def test_attention_of_other_values_is_not_used(
    kernel: ModuleType, error: float, last_rows: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = kernel.TritonPlan.attend

    def off(*given: object) -> torch.Tensor:
        output = attend(*given).clone()
        output[-last_rows:] += error
        return output

    monkeypatch.setattr(kernel.TritonPlan, "attend", off)
    with pytest.raises(UnsupportedProcessorError, match="the Triton kernel of attention gives values on cpu that are"):
        load(caplog)


@pytest.mark.parametrize("has_rules", [False, True])
def test_windows_that_are_one_position_off_matter_to_models_that_have_some(
    kernel: ModuleType, has_rules: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = kernel.TritonPlan.attend

    def off(plan: object, layer: object, query: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        window = None if rule.window is None else rule.window - 1
        output: torch.Tensor = attend(plan, layer, query, replace(rule, window=window))
        return output

    monkeypatch.setattr(kernel.TritonPlan, "attend", off)
    with pytest.raises(UnsupportedProcessorError) if has_rules else nullcontext():
        load(caplog, has_rules=has_rules)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("error", [0.002, 0.0])
def test_wide_tiles_of_other_bits_are_not_used(
    kernel: ModuleType, error: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Backend(kernel.TritonBackend):  # type: ignore[misc, name-defined]
        def __init__(self, *given: object, wide_from: float) -> None:
            super().__init__(*given, wide_from=wide_from)
            self.wide_from = wide_from

        def plan(self, *given: object) -> Any:
            plan = super().plan(*given)
            attend = plan.attend
            plan.attend = lambda *given: attend(*given) + (error if self.wide_from == 0 else 0.0)
            return plan

    monkeypatch.setattr(kernel, "TritonBackend", Backend)
    gpu = load(caplog, torch.float16)
    assert ("wide ones give other bits" in caplog.text) == bool(error)
    assert gpu.backend(16).wide_from == (math.inf if error else kernel.WIDE_FROM)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_attention_that_fits_into_no_registers_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    load(caplog, torch.float16, quantized_kv=True)
    with pytest.raises(UnsupportedProcessorError, match="in 8 bits and dtype float32"):
        load(caplog, torch.float32, quantized_kv=True)
    with pytest.raises(UnsupportedProcessorError, match="257 dimensions"):
        load(caplog, torch.float16, heads=(4, 2, 257))


def test_without_triton_nothing_is_served(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UnsupportedProcessorError, match="cannot be made on cpu: "):
        load(caplog)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("fault", "step"),
    [
        ("", 2),
        pytest.param("", 1, marks=pytest.mark.slow),
        *product(("other tokens", "other log probabilities", "does not compile"), (1, 2)),
    ],
)
def test_sampling_is_used_where_it_chooses_what_torch_chooses(
    fault: str, step: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def sample(_: object, logits: torch.Tensor, *given: object) -> torch.Tensor:
        if fault == "does not compile":
            raise RuntimeError(fault)
        return torch.zeros(len(logits), dtype=torch.int64)

    def backend(_: int) -> Any:
        raise NotImplementedError

    def logprobs(_: object, logits: torch.Tensor, rows: list[int], *given: Any) -> torch.Tensor:
        return LogitsScan().logprobs(logits * 1.5, rows, *given)

    scan = interpreted("spool.engine.cuda.triton_sampling").TritonScan
    if fault == "other log probabilities":
        monkeypatch.setattr(scan, "logprobs", logprobs)
        monkeypatch.setattr(scan, "sample", LogitsScan.sample)  # the right tokens, in less time
    elif fault:
        monkeypatch.setattr(scan, "sample", sample)
    model = tiny_model("llama", **TORCH_SHAPE)
    loaded = LoadedModel(model, Vocabulary(b"", VOCABULARY), None, GpuPasses("", backend, None))
    assert logits_scan(loaded, None if step == 1 else torch.arange(0, VOCABULARY, step)).beside_host == (not fault)
    assert len(caplog.messages) == (1 if fault else 0)


def test_pinned_memory_is_allocated_while_the_workers_own_gpu_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another one it would open a second context."""
    current: list[torch.device] = []
    pinned_on: list[torch.device] = []

    @contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def allocated(*shape: object, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        pinned_on.append(current[-1])
        return torch.zeros(*shape, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(torch, "empty", allocated)
    second = torch.device("cuda", 1)
    assert pinned([1, 2, 3], second).tolist() == [1, 2, 3]
    assert host_buffer((2, 3), torch.uint8, second).shape == (2, 3)
    assert pinned_on == [second, second]
