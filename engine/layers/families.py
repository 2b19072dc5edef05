"""Families of models whose layers Spool replaces by faster ones, by the names of their classes in transformers.

Names, not imports: transformers renames classes now and then, and one missing name must cost one family its faster
layers, not every model its engine.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from spool.engine.attention.backends import AttentionRule
from spool.engine.layers.linear import joined

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
    found = []
    modules = {type(module).__module__ for module in model.modules()}
    for name, prefix in FAMILIES.items():
        path = f"transformers.models.{name}.modeling_{name}"
        if path not in modules and model.config.model_type != name:
            continue
        try:
            module = importlib.import_module(path)
            parts = ("Model", "DecoderLayer", "Attention", "MLP")
            found.append(FamilyClasses(*(getattr(module, f"{prefix}{part}") for part in parts)))
        except (ImportError, AttributeError) as error:
            logger.warning("%s models keep transformers' own layers, which are slower: %s", name, error)
    return found


class LlamaLayer(nn.Module):
    """What takes the place of a decoder layer of a known family: its weights, in four linear layers."""

    def __init__(
        self,
        layer: nn.Module,
        make_linear: Callable[[nn.Module], nn.Module],
        make_summed: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        """`make_linear` makes what computes a linear layer; `make_summed`, where that is another, one whose inputs
        ranks share."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._index = attention.layer_idx
        self._rule = AttentionRule(attention.scaling, getattr(attention, "sliding_window", None))
        self._head_dim = attention.head_dim
        self._query_heads = attention.q_proj.out_features // attention.head_dim
        self._kv_heads = attention.k_proj.out_features // attention.head_dim
        self._qkv = make_linear(joined([attention.q_proj, attention.k_proj, attention.v_proj]))
        self._out = (make_summed or make_linear)(attention.o_proj)
        self._gate_up = make_linear(joined([mlp.gate_proj, mlp.up_proj]))
        self._down = (make_summed or make_linear)(mlp.down_proj)
        self._attention_norm = weight_and_epsilon(layer.input_layernorm)
        self._mlp_norm = weight_and_epsilon(layer.post_attention_layernorm)
        self._head_norms: tuple[torch.Tensor, torch.Tensor, float] | None = None
        """Weights of the norms of a query head and of a key head, and their epsilon."""
        if hasattr(attention, "q_norm"):
            self._head_norms = (attention.q_norm.weight.detach(), *weight_and_epsilon(attention.k_norm))


def weight_and_epsilon(norm: nn.Module) -> tuple[torch.Tensor, float]:
    """Of the norm of a known family: weight `[width]`, and what is added to the mean square."""
    return norm.weight.detach(), norm.variance_epsilon
