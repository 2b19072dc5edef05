"""A GPU's layers are compared with the model's own before they serve: wrong ones are refused by their name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from spool.engine.attention.backends import AttentionRule
from spool.engine.attention.paged_step import ATTENTION_NAME
from spool.engine.cuda.setup import GpuPasses
from spool.engine.errors import UnsupportedModelError
from spool.engine.layers.description import DecoderLayer
from spool.engine.models.loaded_model import LoadedModel
from spool.engine.models.replaced_layers import replace_layers
from spool.engine.models.vocabulary import Vocabulary
from tests.support.tiny_models import VOCABULARY, tiny_model
from tests.support.triton_kernel import interpreted, multiply_in_one_order

PAGE, LAYERS = 16, 4
CPU = torch.device("cpu")


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    interpreted("spool.engine.cuda.triton_attention")
    multiply_in_one_order(monkeypatch)
    return importlib.import_module("spool.engine.cuda.fused_decoder")


def loaded_model(family: str, dtype: torch.dtype, layers: int = 2) -> LoadedModel:
    attention, products = (
        importlib.import_module(f"spool.engine.cuda.triton_{name}") for name in ("attention", "product")
    )
    torch.manual_seed(1)
    model = tiny_model(family, num_hidden_layers=layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Layers add as much as there is, as those of trained models do; norms have weights of their own.
            deviation = 0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.normal_(float(name.endswith("norm.weight")), deviation)
    model.to(dtype).set_attn_implementation(ATTENTION_NAME)
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    gpu = GpuPasses("", lambda page: attention.TritonBackend(*heads, page, CPU), None, products.TritonLinear)
    return LoadedModel(model, Vocabulary(b"", VOCABULARY), None, gpu)


@pytest.mark.parametrize(
    ("family", "layers", "dtype"),
    [
        ("llama", 1, torch.float32),
        ("llama", 1, torch.float16),
        pytest.param("qwen3", 3, torch.bfloat16, marks=pytest.mark.slow),
        ("glm4", 2, torch.bfloat16),
        ("qwen3_moe", 2, torch.bfloat16),
    ],
)
@pytest.mark.usefixtures("decoder")
def test_layers_that_compute_the_same_are_taken(family: str, layers: int, dtype: torch.dtype) -> None:
    loaded = loaded_model(family, dtype, layers)
    if dtype == torch.float32:
        loaded = replace(loaded, gpu=GpuPasses("", loaded.gpu.backend, None))  # type: ignore[union-attr]
    replace_layers(loaded, PAGE)
    linears = [module for module in loaded.model.modules() if type(module) is nn.Linear]
    assert bool(linears) == (dtype == torch.float32)


def turned(rotate: Callable[..., Any]) -> Callable[..., Any]:
    """Rotations of twice the position."""

    def wrong(positions: torch.Tensor, *given: object) -> Any:
        return rotate(positions * 2, *given)

    return wrong


def unscaled(write: Callable[..., Any]) -> Callable[..., Any]:
    """Heads without their norms."""

    def wrong(*given: Any) -> Any:
        return write(*given[:6], None, *given[7:])

    return wrong


def swapped(gates: Callable[..., Any]) -> Callable[..., Any]:
    """Gates for values, and values for gates."""

    def wrong(parts: Any, *given: object) -> Any:
        return gates(parts._replace(sums=torch.cat(parts.sums.chunk(2, -1)[::-1], -1)), *given)

    return wrong


def linear_gates(_: Callable[..., Any]) -> Callable[..., Any]:
    """A sigmoid that is taken for a half, the first term of its series."""

    def wrong(parts: Any, dtype: torch.dtype, *given: object) -> Any:
        gate, up = parts.sums.sum(0).to(dtype).chunk(2, -1)
        return gate * 0.5 * up

    return wrong


def without_attention(norm: Callable[..., Any]) -> Callable[..., Any]:
    """What the first layer's attention gives is not added, in any pass."""
    calls = 0

    def wrong(residual: torch.Tensor, added: Any, *given: object, **named: object) -> Any:
        nonlocal calls
        # Behind the embedding, two of each layer, and the last one.
        if calls % (2 * LAYERS + 2) == 2:
            product = added.product._replace(sums=torch.zeros_like(added.product.sums))
            added = added._replace(product=product)
        calls += 1
        return norm(residual, added, *given, **named)

    return wrong


WRONG: dict[str, tuple[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "positions": ("rotations", turned),
    "no norms of heads": ("rotate_write", unscaled),
    "gate and up": ("activate", swapped),
    "another activation": ("activate", linear_gates),
    "one layer's attention lost": ("add_norm", without_attention),
}


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        *(pytest.param(fault, torch.bfloat16, marks=pytest.mark.slow) for fault in WRONG),
        ("positions", torch.float16),
    ],
)
def test_layers_that_compute_something_else_are_refused(
    decoder: ModuleType, fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, make_wrong = WRONG[fault]
    monkeypatch.setattr(decoder, kernel, make_wrong(getattr(decoder, kernel)))
    with pytest.raises(UnsupportedModelError, match=r"qwen3 computes something else .*: a fused decoder"):
        replace_layers(loaded_model("qwen3", dtype, LAYERS), PAGE)


@pytest.mark.usefixtures("decoder")
def test_products_that_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one column of one layer."""
    products = interpreted("spool.engine.cuda.triton_product")
    forward = products.TritonLinear.forward

    def wrong(self: Any, rows: torch.Tensor) -> torch.Tensor:
        return forward(self, rows) * (torch.arange(self.out_features) != 3)  # type: ignore[no-any-return]

    monkeypatch.setattr(products.TritonLinear, "forward", wrong)
    with pytest.raises(UnsupportedModelError, match=r"apertus computes something else .*: products of its own"):
        replace_layers(loaded_model("apertus", torch.float16), PAGE)


def test_attention_of_another_scale_is_refused(decoder: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = decoder.CudaDecoderLayer
    start = layer.__init__

    def wrong(self: Any, description: DecoderLayer, *given: object) -> None:
        rule = AttentionRule(description.rule.scaling * 0.5)
        start(self, replace(description, rule=rule), *given)

    monkeypatch.setattr(layer, "__init__", wrong)
    with pytest.raises(UnsupportedModelError, match=r"llama computes something else .*: a fused decoder"):
        replace_layers(loaded_model("llama", torch.bfloat16), PAGE)
