"""Families of models whose layers Spool replaces by faster ones, by the names of their classes in transformers.

Names, not imports: transformers renames classes now and then, and one missing name must cost one family its faster
layers, not every model its engine.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from engine.attention.backends import AttentionRule
from engine.quantization.layers import QuantizedLinear, joined_quantized

logger = logging.getLogger(__name__)

SILU = (nn.SiLU, SiLUActivation)
"""Classes of the activation that fused layers of the Llama kind compute."""


FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
"""Families of the Llama kind: the name of the module in transformers.models, and how the names of its classes begin."""


@dataclass(frozen=True, slots=True)
class FamilyClasses:
    """Classes of one family. Subclasses are other classes: they may compute something else."""

    decoder: type[nn.Module]
    layer: type[nn.Module]
    attention: type[nn.Module]
    mlp: type[nn.Module]


def families_of(model: PreTrainedModel) -> list[FamilyClasses]:
    """Classes of the known families that `model` is made of; empty for a model of another family.

    A family whose classes this version of transformers does not have is left out, with a line in the log.
    """
    return list(_resolved(model))


def _resolved(model: PreTrainedModel) -> Iterator[FamilyClasses]:
    modules = {type(module).__module__ for module in model.modules()}
    for name, prefix in FAMILIES.items():
        path = f"transformers.models.{name}.modeling_{name}"
        if path not in modules and model.config.model_type != name:
            continue
        try:
            module = importlib.import_module(path)
            yield FamilyClasses(
                decoder=getattr(module, f"{prefix}Model"),
                layer=getattr(module, f"{prefix}DecoderLayer"),
                attention=getattr(module, f"{prefix}Attention"),
                mlp=getattr(module, f"{prefix}MLP"),
            )
        except (ImportError, AttributeError) as error:
            logger.warning("%s models keep transformers' own layers, which are slower: %s", name, error)


class LlamaLayer(nn.Module):
    """What takes the place of a decoder layer of a known family: its weights, in four linear layers."""

    def __init__(self, layer: nn.Module, make_linear: Callable[[nn.Module], nn.Module]) -> None:
        """`make_linear` makes what computes a linear layer."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._index = attention.layer_idx
        self._rule = AttentionRule(attention.scaling, getattr(attention, "sliding_window", None))
        self._head_dim = attention.head_dim
        self._query_heads = attention.q_proj.out_features // attention.head_dim
        self._kv_heads = attention.k_proj.out_features // attention.head_dim
        self._qkv = make_linear(joined([attention.q_proj, attention.k_proj, attention.v_proj]))
        self._out = make_linear(attention.o_proj)
        self._gate_up = make_linear(joined([mlp.gate_proj, mlp.up_proj]))
        self._down = make_linear(mlp.down_proj)
        self._attention_norm = weight_and_epsilon(layer.input_layernorm)
        self._mlp_norm = weight_and_epsilon(layer.post_attention_layernorm)
        self._head_norms: tuple[torch.Tensor, torch.Tensor, float] | None = None
        """Weights of the norms of a query head and of a key head, and their epsilon."""
        if hasattr(attention, "q_norm"):
            self._head_norms = (attention.q_norm.weight.detach(), *weight_and_epsilon(attention.k_norm))


@dataclass(frozen=True, slots=True)
class Experts:
    """Those of a sparse layer: weights `[experts, out, in]`, biases `[experts, out]`, and `gate`, which makes
    `[rows, inner]` of the outputs of `gate_up`. With `has_silu` that is silu of their first half times their second."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    gate: Callable[[torch.Tensor], torch.Tensor]
    has_silu: bool

    @classmethod
    def of(cls, module: nn.Module) -> Experts:
        """Of one that transformers' `use_experts_implementation` has decorated."""
        gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
        if module.is_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        gate_up_bias = module.gate_up_proj_bias.detach() if module.has_bias else None
        down_bias = module.down_proj_bias.detach() if module.has_bias else None
        # The gate is to keep no weights alive.
        gating = copy.copy(module)
        gating._parameters = {}
        has_silu = type(module)._apply_gate.__name__ == "_default_apply_gate" and type(module.act_fn) in SILU
        return cls(gate_up, down, gate_up_bias, down_bias, gating._apply_gate, has_silu)


@dataclass(frozen=True, slots=True)
class SparseBlock:
    """A module that routes rows to experts."""

    module: nn.Module
    experts: Experts

    def replace(self, experts: nn.Module, make_linear: Callable[[nn.Linear], nn.Module]) -> None:
        """`make_linear` makes what computes the product of the router."""
        self.module.experts = experts
        for name in ("gate", "router"):
            router = getattr(self.module, name, None)
            if router is not None and type(router) is not nn.Linear:
                setattr(self.module, name, OwnRouter(router, make_linear))


def sparse_blocks(model: PreTrainedModel) -> Iterator[SparseBlock]:
    """Those whose experts use transformers' interface. Weights of replaced ones are free when the next one comes."""
    blocks = [module for module in model.modules() if getattr(getattr(module, "experts", None), "has_gate", False)]
    for block in blocks:
        yield SparseBlock(block, Experts.of(block.experts))


class OwnRouter(nn.Module):
    """A router whose product is computed by another layer."""

    def __init__(self, router: nn.Module, make_linear: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        # No submodule: some routers are linear layers.
        self._route = router.forward
        self._own = _OwnOperations(make_linear)

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self._own:
            return self._route(*given)


class _OwnOperations(TorchFunctionMode):
    """Computes what is given to `F.linear`, always with one weight and in one dtype, by a layer of its own, and the
    sigmoid of a number by itself."""

    def __init__(self, make_linear: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self._make_linear = make_linear
        self._linear: nn.Module | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.sigmoid, torch.Tensor.sigmoid):
            return func(apart(args[0]))
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        rows, *weights = args
        if self._linear is None:
            self._linear = self._make_linear(linear_of(*weights))
        return self._linear(rows)


def apart(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers, with room between them. On a CPU, torch then computes functions of them one by one: in a vector
    some have other bits, and which ones fill a vector depends on how many there are."""
    return F.pad(numbers.unsqueeze(-1), (0, 1))[..., 0]


def joined(layers: Sequence[nn.Linear | QuantizedLinear]) -> nn.Linear | QuantizedLinear:
    """One layer whose outputs are those of `layers`, one after the other. They have a bias all or none; where some are
    quantised and some are not, the whole is expanded."""
    quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    if len(quantized) == len(layers):
        return joined_quantized(quantized)
    dtype = next(layer.weight.dtype for layer in layers if isinstance(layer, nn.Linear))
    with torch.no_grad():
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        return linear_of(torch.cat([_plain_weight(layer, dtype) for layer in layers]), bias)


def _plain_weight(layer: nn.Linear | QuantizedLinear, dtype: torch.dtype) -> torch.Tensor:
    return layer.quantized.expanded().to(dtype) if isinstance(layer, QuantizedLinear) else layer.weight


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """The layer of a weight `[out, in]`, which is not copied."""
    linear = nn.Linear(1, 1, bias=bias is not None)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def weight_and_epsilon(norm: nn.Module) -> tuple[torch.Tensor, float]:
    """Of the norm of a known family: weight `[width]`, and what is added to the mean square."""
    return norm.weight.detach(), norm.variance_epsilon
