"""What a decoder layer computes, as data: every fast runner follows this description, and knows no family.

Linear layers are modules, of plain or quantised weights, or of those that ranks share. Their outputs have the order
that `LayerWeights` says, whatever order the model's own have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import nn

from spool.engine.attention.backends import AttentionRule


class Activation(IntEnum):
    """The numbers are those of engine/cpu/csrc/kernels.h."""

    SILU = 0
    GELU = 1
    """By the error function."""
    GELU_TANH = 2
    """By the hyperbolic tangent."""
    RELU = 3
    RELU_SQUARED = 4


@dataclass(frozen=True, slots=True)
class Norm:
    """Divides a row by its root mean square; if `centred`, once its mean is subtracted (layer normalization). Then
    multiplies by `weight` and adds `bias`, both float32 of the row's width."""

    weight: torch.Tensor
    epsilon: float
    bias: torch.Tensor | None = None
    centred: bool = False


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of queries and keys, with weights for all heads, float32 `[heads * head_dim]`. Each head is a row of its
    own, or, if `whole`, all of them are one. They come before the rotation, or `after_rotation`."""

    queries: Norm
    keys: Norm
    whole: bool = False
    after_rotation: bool = False


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary positions: radians a position and what cosines and sines are multiplied by, each float32
    `[head_dim / 2]`. Cosines and sines are rounded to `dtype`."""

    frequencies: torch.Tensor
    scalings: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A layer adds to its input, the residual, what attention makes of it, and then what the MLP does:

        residual += multiplier * attention_post_norm(out(attend(qkv(attention_norm(residual)))))
        residual += multiplier * mlp_post_norm(down(activation(gate) * up(mlp_norm(residual))))

    A norm that is None changes nothing. An MLP that is not `gated` has activation(up) in the middle; one of experts has
    no `activation`. In a `parallel` layer the MLP reads what attention reads: the residual before both, by its own norm
    or, without one, by that of attention.

    The rotation `rotation` of `Decoder.rotations` turns each number of a head's first half with its fellow of the
    second half.
    """

    index: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rule: AttentionRule
    rotation: int
    attention_norm: Norm | None
    mlp_norm: Norm | None
    attention_post_norm: Norm | None
    mlp_post_norm: Norm | None
    head_norms: HeadNorms | None
    activation: Activation | None
    gated: bool
    multiplier: float
    parallel: bool


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The products of a layer. `qkv` gives all heads of queries, then keys, then values, `head_dim` numbers each; `up`
    gates and then their fellows, where the MLP is gated. `experts` takes the place of `up` and `down`:
    `[1, rows, hidden]` to the same, or to a tuple that begins with it."""

    qkv: nn.Module
    out: nn.Module
    up: nn.Module | None
    down: nn.Module | None
    experts: nn.Module | None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model but for its head: embeddings times `embedding_multiplier`, and normalized where there is an
    `embedding_norm`; layers; and the last norm. Of the head's products, which are the logits, `head_multiplier` is a
    factor; with `head_cap` c they then become c tanh(logit / c).

    `weights` gives those of each of `layers` modules. It shares them where it can, so that replacing the modules one
    after the other never keeps all weights twice.
    """

    embed: nn.Module
    layers: nn.ModuleList
    descriptions: Sequence[DecoderLayer]
    weights: Callable[[nn.Module], LayerWeights]
    rotations: Sequence[Rotation]
    norm: Norm
    embedding_multiplier: float = 1.0
    embedding_norm: Norm | None = None
    head_multiplier: float = 1.0
    head_cap: float | None = None
