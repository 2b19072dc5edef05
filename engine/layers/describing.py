"""Reads a model's decoder into its description, by its family's entry.

Modules are found by their names: transformers renames some now and then, and one missing name must cost one family its
fast layers, not every model its engine. A model that its entry does not fit, or whose layers have tensors that the
entry does not know, has no description and keeps transformers' own layers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
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
    family, config, decoder = family_of(model), model.config, model.base_model
    if family is None or not family.fits(config):
        return None
    name = config.model_type
    try:
        layers: nn.ModuleList = decoder.layers
        rotations, tables = _rotations(family, decoder, layers, model.dtype, head_multiple)
        describe_layer = partial(_layer, family, tables, head_multiple, decoder.device)
        for layer in layers:
            _check(family, layer, size_multiple, head_multiple)
        norm = partial(_norm, family, width=config.hidden_size, device=decoder.device)
        cap = None if family.head_cap is None else getattr(config, family.head_cap)
        before = None if family.embedding_norm is None else getattr(decoder, family.embedding_norm)
        return Decoder(
            embed=getattr(decoder, family.embed),
            layers=layers,
            layer=describe_layer,
            rotations=rotations,
            norm=norm(getattr(decoder, family.norm)),
            embedding_multiplier=float(getattr(decoder, "embedding_multiplier", 1.0)),
            embedding_norm=None if before is None else norm(before),
            head_multiplier=float(family.head_multiplier(config)),
            head_cap=None if not cap else float(cap),
        )
    except (_NotDescribedError, AttributeError) as error:
        logger.warning("%s keeps transformers' own layers, which are slower: %s", name, error)
        return None


def windows(model: PreTrainedModel) -> tuple[int | None, ...] | None:
    """Of the layers of a described family, None for those that see everything; None for other families."""
    family = family_of(model)
    if family is None:
        return None
    return tuple(family.window(getattr(layer, family.attention)) or None for layer in model.base_model.layers)


def attention_of(model: PreTrainedModel, layer: nn.Module) -> nn.Module:
    """The attention module of a layer of a described family."""
    family = family_of(model)
    assert family is not None, "the family has no description"
    attention: nn.Module = getattr(layer, family.attention)
    return attention


def _check(family: Family, layer: Any, size_multiple: int, head_multiple: int) -> None:
    """Raises _NotDescribedError, or AttributeError, for a layer that no description fits."""
    attention, mlp = getattr(layer, family.attention), getattr(layer, family.mlp)
    head_dim = _head_dim(attention)
    linears = [getattr(attention, name) for name in (*family.qkv, family.out)]
    if not _has_experts(mlp):
        linears += [getattr(mlp, name) for name in (*family.up, family.down)]
        if type(getattr(mlp, family.activation)) not in ACTIVATIONS:
            raise _NotDescribedError(f"its activation is {type(getattr(mlp, family.activation)).__name__}")
    elif family.parallel(layer):
        raise _NotDescribedError("it has experts beside attention")
    if others := {type(linear).__name__ for linear in linears if not isinstance(linear, _LINEAR)}:
        raise _NotDescribedError(f"it has linear layers of type {', '.join(sorted(others))}")
    if unknown := sorted(name for name in layer.state_dict() if not name.startswith(_known(family, mlp))):
        raise _NotDescribedError(f"its entry does not know {', '.join(unknown)}")
    # The inputs of the projection behind attention are filled up with those of the heads.
    sizes = [linear.in_features for linear in linears if linear is not linears[len(family.qkv)]]
    if any(size % size_multiple for size in sizes):
        raise _NotDescribedError(f"it has sizes {sizes}, must be multiples of {size_multiple}")
    if head_dim % head_multiple:
        if _head_norms(family, attention) is not None:
            raise _NotDescribedError(f"its heads are normalized and have {head_dim} dimensions")
        if not all(type(linear) is nn.Linear for linear in linears):
            raise _NotDescribedError(f"its quantised or divided heads have {head_dim} dimensions")


def _known(family: Family, mlp: Any) -> tuple[str, ...]:
    """How the names of a layer's tensors begin that a description has."""
    norms = family.attention_norm, family.attention_post_norm, family.mlp_norm, family.mlp_post_norm
    of_attention = *family.qkv, family.out, *family.head_norms
    of_mlp = ("",) if _has_experts(mlp) else (*family.up, family.down)
    return (
        *(f"{norm}." for norm in norms if norm is not None),
        *(f"{family.attention}.{name}." for name in of_attention),
        f"{family.attention}.sinks",
        *(f"{family.mlp}.{name}" for name in of_mlp),
    )


def _has_experts(mlp: Any) -> bool:
    """Also of those that ranks share."""
    return hasattr(getattr(mlp, "part", mlp), "experts")


def _head_dim(attention: Any) -> int:
    size: int = attention.head_dim if hasattr(attention, "head_dim") else attention.head_size
    return size


def _head_norms(family: Family, attention: Any) -> list[Any] | None:
    norms = [getattr(attention, name, None) for name in family.head_norms]
    return None if None in norms else norms


def _rotations(
    family: Family, decoder: Any, layers: nn.ModuleList, dtype: torch.dtype, head_multiple: int
) -> tuple[list[Rotation], dict[str, tuple[int, int]]]:
    """Those that layers have; by name, the place of each, and how many numbers of a head it turns."""
    rotary, found = decoder.rotary_emb, list[Rotation]()
    tables = dict[str, tuple[int, int]]()
    for layer in layers:
        attention = getattr(layer, family.attention)
        name = _rotation_name(family, attention)
        if name in tables:
            continue
        half = -(-_head_dim(attention) // head_multiple) * head_multiple // 2
        frequencies = torch.zeros(half, dtype=torch.float32, device=decoder.device)
        scalings, turned = torch.ones_like(frequencies), 0
        if name != _NO_ROTATION:
            own = getattr(rotary, f"{name}_inv_freq" if name else "inv_freq").float()
            turned = 2 * len(own)
            frequencies[: len(own)] = -own if family.backwards else own
            scalings[: len(own)] = getattr(rotary, f"{name}_attention_scaling" if name else "attention_scaling")
        tables[name] = len(found), turned
        angles = torch.float32 if family.exact_angles else dtype
        found.append(Rotation(frequencies, scalings, angles))
    return found, tables


def _rotation_name(family: Family, attention: Any) -> str:
    if not family.rotated(attention):
        return _NO_ROTATION
    return "" if family.rotation is None else family.rotation(attention)


def _norm(family: Family, module: Any, width: int, device: torch.device) -> Norm:
    """Of a module whose rows are `width` wide, or that has as many weights as there are."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if weight is None:
        weight = torch.ones(width, dtype=torch.float32, device=device)
    else:
        weight = weight.detach().float().flatten() + family.norm_offset
    epsilon = next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)
    return Norm(
        weight=weight,
        epsilon=_OLMO_EPSILON if epsilon is None else float(epsilon),
        bias=None if bias is None else bias.detach().float(),
        centred=type(module).__name__.endswith("LayerNorm"),
    )


_OLMO_EPSILON = 1e-5
"""Of the only norm that does not tell its own."""


def _norm_of_layer(family: Family, layer: Any, width: int, device: torch.device, name: str | None) -> Norm | None:
    module = None if name is None else getattr(layer, name)
    return None if module is None or isinstance(module, nn.Identity) else _norm(family, module, width, device)


def _layer(
    family: Family, tables: Mapping[str, tuple[int, int]], head_multiple: int, device: torch.device, layer: Any
) -> tuple[DecoderLayer, LayerWeights]:
    """`tables`: by name, the place of a rotation, and how many numbers of a head it turns."""
    attention, mlp = getattr(layer, family.attention), getattr(layer, family.mlp)
    head_dim = _head_dim(attention)
    padded = -(-head_dim // head_multiple) * head_multiple
    rotation, turned = tables[_rotation_name(family, attention)]
    qkv, out = joined([getattr(attention, name) for name in family.qkv]), getattr(attention, family.out)
    query_heads, kv_heads = _heads(family, attention, qkv.out_features, head_dim)
    order = _head_order(head_dim, padded, turned, family.interleaved)
    norm = partial(_norm_of_layer, family, layer, out.out_features, device)
    norms = _head_norms(family, attention)
    has_experts = _has_experts(mlp)
    description = DecoderLayer(
        index=attention.layer_idx,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=padded,
        rule=_rule(family, attention),
        rotation=rotation,
        attention_norm=norm(family.attention_norm),
        mlp_norm=norm(family.mlp_norm),
        attention_post_norm=norm(family.attention_post_norm),
        mlp_post_norm=norm(family.mlp_post_norm),
        head_norms=None if norms is None else _norms_of_heads(family, norms, query_heads, kv_heads, order, device),
        activation=None if has_experts else ACTIVATIONS[type(getattr(mlp, family.activation))],
        gated=family.gated,
        multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
        parallel=family.parallel(layer),
    )
    weights = LayerWeights(
        qkv=with_outputs(qkv, _rows(family, query_heads, kv_heads, head_dim, order)),
        out=out if padded == head_dim else with_inputs(out, _filled(query_heads, head_dim, padded)),
        up=None if has_experts else joined([getattr(mlp, name) for name in family.up]),
        down=None if has_experts else getattr(mlp, family.down),
        experts=mlp if has_experts else None,
    )
    return description, weights


def _rule(family: Family, attention: Any) -> AttentionRule:
    sinks = getattr(attention, "sinks", None)
    softcap = None if family.softcap is None else getattr(attention, family.softcap)
    sinks = None if sinks is None else sinks.detach().float()
    return AttentionRule(float(attention.scaling), family.window(attention) or None, softcap or None, sinks)


def _heads(family: Family, attention: Any, outputs: int, head_dim: int) -> tuple[int, int]:
    """Of queries and of keys."""
    heads = outputs // head_dim
    if family.qkv_by_head:
        return heads // 3, heads // 3
    if len(family.qkv) == 3:
        kv_heads = getattr(attention, family.qkv[1]).out_features // head_dim
    else:
        kv_heads = attention.config.num_key_value_heads
    return heads - 2 * kv_heads, kv_heads


def _head_order(head_dim: int, padded: int, turned: int, interleaved: bool) -> torch.Tensor:
    """Of a head of queries or keys: which of its numbers each place of its description has (int64 `[padded]`, -1 for
    zero), so that halves are turned against each other, and what is not among the first `turned` numbers stays behind
    those in either half."""
    numbers = torch.arange(head_dim)
    first, second = (numbers[:turned:2], numbers[1:turned:2]) if interleaved else numbers[:turned].chunk(2)
    rest, zeros = numbers[turned:].chunk(2), torch.full(((padded - head_dim) // 2,), -1)
    if turned == 0:
        first = second = numbers[:0]
    if turned == head_dim:
        rest = (numbers[:0], numbers[:0])
    return torch.cat((first, rest[0], zeros, second, rest[1], zeros))


def _rows(family: Family, query_heads: int, kv_heads: int, head_dim: int, order: torch.Tensor) -> torch.Tensor:
    """Which output of the model's own projection each output of the described one is; -1 for zero."""
    values = torch.cat((torch.arange(head_dim), torch.full((len(order) - head_dim,), -1)))
    rows = list[torch.Tensor]()
    for head in range(query_heads + 2 * kv_heads):
        places = order if head < query_heads + kv_heads else values
        own = head % kv_heads * 3 + head // kv_heads if family.qkv_by_head else head
        rows.append(torch.where(places < 0, -1, own * head_dim + places))
    return torch.cat(rows)


def _filled(heads: int, head_dim: int, padded: int) -> torch.Tensor:
    """Of each input behind attention, the place among the model's own; -1 for zero."""
    places = torch.arange(padded).expand(heads, padded)
    own = torch.arange(heads).unsqueeze(1) * head_dim + places
    return torch.where(places < head_dim, own, -1).flatten()


def _norms_of_heads(
    family: Family, norms: Sequence[Any], query_heads: int, kv_heads: int, order: torch.Tensor, device: torch.device
) -> HeadNorms:
    counts, head_dim = (query_heads, kv_heads), len(order)
    found = [_norm(family, module, head_dim, device) for module in norms]
    # A weight of one dimension for all heads is of one row of them all; others are of heads, one or each.
    weights = [module.weight for module in norms if hasattr(module, "weight")]
    whole = any(weight.dim() == 1 and len(weight) > head_dim for weight in weights)

    def of_heads(numbers: torch.Tensor, count: int) -> torch.Tensor:
        return numbers.view(-1, head_dim).expand(count, head_dim)[:, order].flatten()

    queries, keys = (
        replace(
            norm,
            weight=of_heads(norm.weight, count),
            bias=None if norm.bias is None else of_heads(norm.bias, count),
        )
        for norm, count in zip(found, counts, strict=True)
    )
    return HeadNorms(queries, keys, whole, family.head_norms_after_rotation)
