"""Families of models whose layers Spool replaces by faster ones, by the names of their classes in transformers.

Names, not imports: transformers renames classes now and then, and one missing name must cost one family its faster
layers, not every model its engine.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

logger = logging.getLogger(__name__)

SILU = (nn.SiLU, SiLUActivation)
"""Classes of the activation that fused layers of the Llama kind compute."""


@dataclass(frozen=True, slots=True)
class Family:
    """Names of the classes of a family of the Llama kind: `module` and, in it, one class for each part of a model."""

    module: str
    decoder: str
    layer: str
    attention: str
    mlp: str
    experts: str | None = None
    """In the place of `mlp`, in some layers."""


FAMILIES = {
    "llama": Family(
        "transformers.models.llama.modeling_llama",
        "LlamaModel",
        "LlamaDecoderLayer",
        "LlamaAttention",
        "LlamaMLP",
    ),
    "qwen2": Family(
        "transformers.models.qwen2.modeling_qwen2",
        "Qwen2Model",
        "Qwen2DecoderLayer",
        "Qwen2Attention",
        "Qwen2MLP",
    ),
    "qwen3": Family(
        "transformers.models.qwen3.modeling_qwen3",
        "Qwen3Model",
        "Qwen3DecoderLayer",
        "Qwen3Attention",
        "Qwen3MLP",
    ),
    "qwen3_moe": Family(
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "Qwen3MoeModel",
        "Qwen3MoeDecoderLayer",
        "Qwen3MoeAttention",
        "Qwen3MoeMLP",
        "Qwen3MoeSparseMoeBlock",
    ),
}


@dataclass(frozen=True, slots=True)
class FamilyClasses:
    """The classes that a `Family` names. Subclasses are other classes: they may compute something else."""

    decoder: type[nn.Module]
    layer: type[nn.Module]
    attention: type[nn.Module]
    mlp: type[nn.Module]
    experts: type[nn.Module] | None


def families_of(model: PreTrainedModel) -> list[FamilyClasses]:
    """Classes of the known families that `model` is made of; empty for a model of another family.

    A family whose classes this version of transformers does not have is left out, with a line in the log.
    """
    return list(_resolved(model))


def _resolved(model: PreTrainedModel) -> Iterator[FamilyClasses]:
    modules = {type(module).__module__ for module in model.modules()}
    for name, family in FAMILIES.items():
        if family.module not in modules and model.config.model_type != name:
            continue
        try:
            module = importlib.import_module(family.module)
            yield FamilyClasses(
                decoder=getattr(module, family.decoder),
                layer=getattr(module, family.layer),
                attention=getattr(module, family.attention),
                mlp=getattr(module, family.mlp),
                experts=None if family.experts is None else getattr(module, family.experts),
            )
        except (ImportError, AttributeError) as error:
            logger.warning("%s models keep transformers' own layers, which are slower: %s", name, error)


def weight_and_epsilon(norm: nn.Module) -> tuple[torch.Tensor, float]:
    """Of the norm of a known family: weight `[width]`, and what is added to the mean square."""
    return norm.weight.detach(), norm.variance_epsilon
