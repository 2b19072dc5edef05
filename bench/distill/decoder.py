"""One token for many rows of equal length, with what training needs of each: no padding, no page tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from engine.cpu.linear import PrepackedLinear, can_prepack
from engine.models.joined_layers import FusedRmsNorm

# Attention works over a multiple of these positions, the rest masked, so that kernels see few shapes.
_POSITIONS = 64


@dataclass(frozen=True, slots=True)
class DecodedPosition:
    """Of every row: the input of layer `feature_layer` [B, H], the output of the final norm [B, H], logits [B, V]."""

    features: Tensor
    final: Tensor
    logits: Tensor


class BatchDecoder:
    """Feeds `rows` sequences position by position, up to `length`.

    Takes Llama models as they are in transformers. Raises `ValueError` for another one.
    """

    def __init__(self, model: PreTrainedModel, feature_layer: int, rows: int, length: int) -> None:
        layers = model.get_decoder().layers
        if any(type(layer) is not LlamaDecoderLayer for layer in layers):
            raise ValueError(f"the target is a {model.config.model_type} model, must be llama")
        if not 0 <= feature_layer < len(layers):
            raise ValueError(f"feature_layer is {feature_layer}, must be at least 0 and below {len(layers)}")
        self._feature_layer = feature_layer
        self._embedding = model.get_input_embeddings().weight.detach()
        self._layers = [_Layer(layer) for layer in layers]
        self._norm = FusedRmsNorm(model.get_decoder().norm)
        self._head = _linear([model.get_output_embeddings()])
        config, like = model.config, self._embedding
        self._head_dim = layers[0].self_attn.head_dim
        self._query_heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        positions = torch.arange(length, device=like.device)[None]
        cos, sin = model.get_decoder().rotary_emb(like, positions)
        self._cos, self._sin = cos[0], sin[0]
        self._keys = like.new_zeros(len(layers), rows * self._kv_heads, length, self._head_dim)
        self._values = torch.zeros_like(self._keys)

    @torch.inference_mode()
    def step(self, tokens: Tensor, position: int) -> DecodedPosition:
        """Feeds `tokens` [B] at `position`; those before it must have been fed."""
        hidden = features = self._embedding[tokens]
        end = min(-(-(position + 1) // _POSITIONS) * _POSITIONS, self._keys.shape[2])
        mask = hidden.new_zeros(end)
        mask[position + 1 :] = float("-inf")
        for index, layer in enumerate(self._layers):
            if index == self._feature_layer:
                features = hidden
            hidden = hidden + layer.out(self._attend(index, layer.qkv(layer.attention_norm(hidden)), position, mask))
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
            hidden = hidden + layer.down(layer.activation(gate) * up)
        final = self._norm(hidden)
        return DecodedPosition(features, final, self._head(final))

    def _attend(self, index: int, qkv: Tensor, position: int, mask: Tensor) -> Tensor:
        """[B, (query + 2 KV heads) · D] to [B, query heads · D]."""
        heads = qkv.view(len(qkv), -1, self._head_dim)
        queries, keys, values = heads.split((self._query_heads, self._kv_heads, self._kv_heads), dim=1)
        self._keys[index, :, position] = self._rotate(keys, position).flatten(0, 1)
        self._values[index, :, position] = values.flatten(0, 1)
        # The query heads of a KV head are the rows of one small matrix, so that KV is read once and not repeated.
        grouped = (self._rotate(queries, position) * self._head_dim**-0.5).reshape(
            len(qkv) * self._kv_heads, -1, self._head_dim
        )
        seen = slice(0, len(mask))
        scores = torch.bmm(grouped, self._keys[index, :, seen].transpose(1, 2)).add_(mask)
        return torch.bmm(torch.softmax(scores, dim=-1), self._values[index, :, seen]).reshape(len(qkv), -1)

    def _rotate(self, heads: Tensor, position: int) -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        return heads * self._cos[position] + torch.cat((-second, first), dim=-1) * self._sin[position]


class _Layer:
    """A layer's parts, linear layers with the same input joined."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention_norm = FusedRmsNorm(layer.input_layernorm)
        self.qkv = _linear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = _linear([attention.o_proj])
        self.mlp_norm = FusedRmsNorm(layer.post_attention_layernorm)
        self.gate_up = _linear([mlp.gate_proj, mlp.up_proj])
        self.down = _linear([mlp.down_proj])
        self.activation = mlp.act_fn


def _linear(layers: Sequence[nn.Linear]) -> nn.Module:
    """One layer with the outputs of all, with prepacked weights where this machine can."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    joined = nn.Linear(1, 1, bias=layers[0].bias is not None)
    joined.in_features, joined.out_features = weight.shape[1], weight.shape[0]
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if layers[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([layer.bias.detach() for layer in layers]), requires_grad=False)
    return PrepackedLinear(joined) if can_prepack(weight) else joined
