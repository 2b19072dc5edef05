"""Reads a model's decoder into its description, by its family's entry.

Modules are found by their names: transformers renames some now and then, and one missing name must cost one family its
fast layers, not every model its engine. A model that its entry does not fit, or whose layers have tensors that the
entry does not know, has no description and keeps transformers' own layers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from spool.engine.attention.backends import AttentionRule
from spool.engine.layers.description import (
    Activation,
    Decoder,
    DecoderLayer,
    HeadNorms,
    LayerWeights,
    Norm,
    Rotation,
)
from spool.engine.layers.families import FAMILIES, Family
from spool.engine.layers.linear import joined, with_inputs, with_outputs
from spool.engine.layers.plain_norms import epsilon_of
from spool.engine.parallel.layers import SummedLinear
from spool.engine.quantization.layers import QuantizedLinear

logger = logging.getLogger(__name__)

_LINEAR = (nn.Linear, QuantizedLinear, SummedLinear)
ACTIVATIONS: Mapping[type, Activation] = {
    **{type(ACT2FN[name]): Activation.SILU for name in ("silu", "swish")},
    type(ACT2FN["gelu"]): Activation.GELU,
    **{type(ACT2FN[name]): Activation.GELU_TANH for name in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")},
    type(ACT2FN["relu"]): Activation.RELU,
    type(ACT2FN["relu2"]): Activation.RELU_SQUARED,
}
_NO_ROTATION = "none"
_OLMO_EPSILON = 1e-5
"""Of the only norm that does not tell its own."""


class _NotDescribedError(Exception):
    pass


def family_of(model: PreTrainedModel) -> Family | None:
    """None for a model that no entry of `FAMILIES` is about."""
    kind = getattr(type(model.base_model), "config_class", None)
    return None if kind is None else FAMILIES.get(kind.model_type)


def describe(model: PreTrainedModel, size_multiple: int = 1, head_multiple: int = 2) -> Decoder | None:
    """What the decoder of a model computes; None where no entry says so, and where the hidden or the inner size is no
    multiple of `size_multiple`. Heads get zeros up to a multiple of `head_multiple` dimensions. The descriptions of
    layers share weights with the model where these need no other order."""
    family = family_of(model)
    if family is None or not family.fits(model.config):
        return None
    try:
        return _Describer(family, model, size_multiple, head_multiple).decoder()
    except (_NotDescribedError, AttributeError) as error:
        logger.warning("%s keeps transformers' own layers, which are slower: %s", model.config.model_type, error)
        return None


def windows(model: PreTrainedModel) -> tuple[int | None, ...] | None:
    """Of the layers of a described family, None for those that see everything; None for other families."""
    family = family_of(model)
    if family is None:
        return None
    return tuple(family.window(getattr(layer, family.attention)) or None for layer in model.base_model.layers)


def _has_experts(mlp: Any) -> bool:
    """Also of those that ranks share."""
    return hasattr(getattr(mlp, "part", mlp), "experts")


class _Describer:
    """Of one decoder. What it reads of modules raises AttributeError where these are not as the entry says."""

    def __init__(self, family: Family, model: PreTrainedModel, size_multiple: int, head_multiple: int) -> None:
        self._family, self._model, self._decoder = family, model, model.base_model
        self._size_multiple = size_multiple
        self._query_heads = model.config.num_attention_heads
        self._kv_heads = getattr(model.config, "num_key_value_heads", None) or self._query_heads
        attentions = [getattr(layer, family.attention) for layer in self._decoder.layers]
        self._head_dim = getattr(attentions[0], family.out).in_features // self._query_heads
        self._padded = -(-self._head_dim // head_multiple) * head_multiple
        names = dict.fromkeys(map(self._rotation_name, attentions))
        self._rotations = {name: (place, *self._rotation(name)) for place, name in enumerate(names)}

    def decoder(self) -> Decoder:
        """Raises _NotDescribedError where a layer has no description."""
        family, config, decoder = self._family, self._model.config, self._decoder
        cap = None if family.head_cap is None else getattr(config, family.head_cap)
        return Decoder(
            embed=getattr(decoder, family.embed),
            layers=decoder.layers,
            descriptions=[self._description(layer) for layer in decoder.layers],
            weights=self._weights,
            rotations=[rotation for _, rotation, _ in self._rotations.values()],
            norm=self._norm(getattr(decoder, family.norm), config.hidden_size),
            embedding_multiplier=float(getattr(decoder, "embedding_multiplier", 1.0)),
            embedding_norm=self._norm_named(family.embedding_norm, decoder),
            head_multiplier=float(family.head_multiplier(config)),
            head_cap=float(cap) if cap else None,
        )

    def _rotation_name(self, attention: Any) -> str:
        """How the names begin of what turns a layer's heads in the rotary module."""
        if not self._family.rotated(attention):
            return _NO_ROTATION
        by_type = isinstance(self._decoder.rotary_emb.rope_type, dict)
        return f"{attention.config.layer_types[attention.layer_idx]}_" if by_type else ""

    def _rotation(self, name: str) -> tuple[Rotation, torch.Tensor]:
        """And in which order it has the numbers of a head of queries or keys: for each place the model's own (int64
        `[padded]`, -1 for zero). Halves are turned against each other; what is not turned stays behind what is, in
        either half."""
        family, rotary = self._family, self._decoder.rotary_emb
        own, scaling = torch.empty(0, dtype=torch.float32, device=self._decoder.device), 1.0
        if name != _NO_ROTATION:
            own, scaling = getattr(rotary, f"{name}inv_freq").float(), getattr(rotary, f"{name}attention_scaling")
        rest = self._padded // 2 - len(own)
        rotation = Rotation(
            frequencies=F.pad(-own if family.backwards else own, (0, rest)),
            scalings=F.pad(torch.full_like(own, scaling), (0, rest), value=1.0),
            dtype=torch.float32 if family.exact_angles else self._model.dtype,
        )
        turned, others = torch.arange(2 * len(own)), torch.arange(2 * len(own), self._head_dim)
        pairs = (turned[::2], turned[1::2]) if family.interleaved else turned.tensor_split(2)
        halves = [torch.cat(half) for half in zip(pairs, others.tensor_split(2), strict=True)]
        zeros = (self._padded - self._head_dim) // 2
        return rotation, F.pad(torch.stack(halves), (0, zeros), value=-1).flatten()

    def _linears(self, layer: Any) -> tuple[list[Any], list[Any]]:
        """Of attention, and of the MLP unless it has experts; the last ones give what is added."""
        family = self._family
        attention, mlp = getattr(layer, family.attention), getattr(layer, family.mlp)
        of_mlp = () if _has_experts(mlp) else (*family.up, family.down)
        return [getattr(attention, name) for name in (*family.qkv, family.out)], [getattr(mlp, name) for name in of_mlp]

    def _check(self, layer: Any) -> None:
        """Raises _NotDescribedError for a layer that no description fits."""
        family, (of_attention, of_mlp) = self._family, self._linears(layer)
        linears = of_attention + of_mlp
        if not of_mlp and family.parallel(layer):
            raise _NotDescribedError("it has experts beside attention")
        if others := {type(linear).__name__ for linear in linears if not isinstance(linear, _LINEAR)}:
            raise _NotDescribedError(f"it has linear layers of type {', '.join(sorted(others))}")
        norms = family.attention_norm, family.attention_post_norm, family.mlp_norm, family.mlp_post_norm
        known = (
            *(f"{norm}." for norm in norms if norm is not None),
            *(f"{family.attention}.{name}." for name in (*family.qkv, family.out, *family.head_norms)),
            f"{family.attention}.sinks",
            *(f"{family.mlp}.{name}" for name in ((*family.up, family.down) if of_mlp else ("",))),
        )
        if unknown := sorted(name for name in layer.state_dict() if not name.startswith(known)):
            raise _NotDescribedError(f"its entry does not know {', '.join(unknown)}")
        outputs = sum(linear.out_features for linear in of_attention[:-1])
        if outputs != (self._query_heads + 2 * self._kv_heads) * self._head_dim:
            raise _NotDescribedError(f"its queries, keys and values have {outputs} dimensions")
        # The inputs of the projection behind attention are filled up with those of the heads.
        sizes = [linear.in_features for linear in (*of_attention[:-1], *of_mlp)]
        if any(size % self._size_multiple for size in sizes):
            raise _NotDescribedError(f"it has sizes {sizes}, must be multiples of {self._size_multiple}")
        if self._padded != self._head_dim and not all(type(linear) is nn.Linear for linear in linears):
            raise _NotDescribedError(f"its quantised or divided heads have {self._head_dim} dimensions")

    def _description(self, layer: Any) -> DecoderLayer:
        self._check(layer)
        family = self._family
        attention, mlp = getattr(layer, family.attention), getattr(layer, family.mlp)
        rotation, _, order = self._rotations[self._rotation_name(attention)]
        return DecoderLayer(
            index=attention.layer_idx,
            query_heads=self._query_heads,
            kv_heads=self._kv_heads,
            head_dim=self._padded,
            rule=self._rule(attention),
            rotation=rotation,
            attention_norm=self._norm_named(family.attention_norm, layer),
            mlp_norm=self._norm_named(family.mlp_norm, layer),
            attention_post_norm=self._norm_named(family.attention_post_norm, layer),
            mlp_post_norm=self._norm_named(family.mlp_post_norm, layer),
            head_norms=self._head_norms(attention, order),
            activation=None if _has_experts(mlp) else self._activation(mlp),
            gated=family.gated,
            multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
            parallel=family.parallel(layer),
        )

    def _weights(self, layer: Any) -> LayerWeights:
        (*qkv, out), of_mlp = self._linears(layer)
        _, _, order = self._rotations[self._rotation_name(getattr(layer, self._family.attention))]
        values = F.pad(torch.arange(self._head_dim), (0, self._padded - self._head_dim), value=-1)
        heads = torch.cat((order.expand(self._query_heads + self._kv_heads, -1), values.expand(self._kv_heads, -1)))
        own = torch.arange(len(heads))
        if self._family.qkv_by_head:
            own = own.view(-1, 3).T.flatten()
        return LayerWeights(
            qkv=with_outputs(joined(qkv), self._places(heads, own)),
            out=with_inputs(out, self._places(values.expand(self._query_heads, -1), torch.arange(self._query_heads))),
            up=joined(of_mlp[:-1]) if of_mlp else None,
            down=of_mlp[-1] if of_mlp else None,
            experts=None if of_mlp else getattr(layer, self._family.mlp),
        )

    def _places(self, heads: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Of the numbers of heads that lie one after the other, the places among the model's own; -1 for zero. `heads`
        `[heads, padded]` says their places within heads, -1 for zero, and `own` which ones of the model's these are."""
        return torch.where(heads < 0, -1, own.unsqueeze(1) * self._head_dim + heads).flatten()

    def _activation(self, mlp: Any) -> Activation:
        kind = type(getattr(mlp, self._family.activation))
        if kind not in ACTIVATIONS:
            raise _NotDescribedError(f"its activation is {kind.__name__}")
        return ACTIVATIONS[kind]

    def _rule(self, attention: Any) -> AttentionRule:
        sinks = getattr(attention, "sinks", None)
        softcap = None if self._family.softcap is None else getattr(attention, self._family.softcap)
        sinks = None if sinks is None else sinks.detach().float()
        return AttentionRule(float(attention.scaling), self._family.window(attention) or None, softcap or None, sinks)

    def _norm(self, module: Any, width: int) -> Norm:
        """Of a module whose rows are `width` wide, or that has as many weights as there are."""
        weight, bias, epsilon = getattr(module, "weight", None), getattr(module, "bias", None), epsilon_of(module)
        if weight is None:
            weight = torch.ones(width, dtype=torch.float32, device=self._decoder.device)
        else:
            weight = weight.detach().float().flatten() + self._family.norm_offset
        return Norm(
            weight=weight,
            epsilon=_OLMO_EPSILON if epsilon is None else epsilon,
            bias=None if bias is None else bias.detach().float(),
            centred=type(module).__name__.endswith("LayerNorm"),
        )

    def _norm_named(self, name: str | None, owner: nn.Module) -> Norm | None:
        module = None if name is None else getattr(owner, name)
        if module is None or isinstance(module, nn.Identity):
            return None
        return self._norm(module, self._model.config.hidden_size)

    def _head_norms(self, attention: Any, order: torch.Tensor) -> HeadNorms | None:
        modules = [getattr(attention, name, None) for name in self._family.head_norms]
        if None in modules:
            return None
        if (head_dim := self._head_dim) != self._padded:
            raise _NotDescribedError(f"its heads are normalized and have {head_dim} dimensions")

        def of_heads(module: nn.Module, count: int) -> Norm:
            norm = self._norm(module, head_dim)
            weight, bias = (
                None if numbers is None else numbers.view(-1, head_dim).expand(count, head_dim)[:, order].flatten()
                for numbers in (norm.weight, norm.bias)
            )
            return replace(norm, weight=weight, bias=bias)

        # A weight of one dimension for all heads is of one row of them all; others are of heads, one or each.
        weight = getattr(modules[0], "weight", None)
        whole = weight is not None and weight.dim() == 1 and len(weight) > head_dim
        return HeadNorms(
            queries=of_heads(modules[0], self._query_heads),
            keys=of_heads(modules[1], self._kv_heads),
            whole=whole,
            after_rotation=self._family.head_norms_after_rotation,
        )
