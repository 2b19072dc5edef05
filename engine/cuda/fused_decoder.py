"""The whole decoder of a model of the Llama kind for a GPU: per layer four linear layers, attention, and four kernels
for what lies between them (engine/cuda/triton_rows.py).

Kernels overlap where the GPU allows it: one begins while the one before it ends.

The weights and the mathematics are those of transformers' own modules; rounding to 16 bits is less frequent. Models of
another structure are left to engine/layers/joined_layers.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from spool.engine.attention.paged_step import PagedStep
from spool.engine.cuda.triton_product import Parts, TritonLinear, overlaps
from spool.engine.cuda.triton_rows import add_norm, rotate_write, rotations, silu_mul
from spool.engine.layers.families import SILU, FamilyClasses, LlamaLayer, families_of, weight_and_epsilon
from spool.engine.parallel.layers import SummedLinear
from spool.engine.quantization.layers import QuantizedLinear

MakeLinear = Callable[[nn.Linear | QuantizedLinear], nn.Module]
"""Makes what computes a linear layer, `[rows, in]` to `[rows, out]`, both contiguous."""


class CudaDecoderLayer(LlamaLayer):
    def __init__(self, layer: nn.Module, make_linear: MakeLinear, overlap: bool) -> None:
        super().__init__(layer, lambda linear: _made(linear, make_linear))
        self._overlap = overlap

    def forward(
        self,
        residual: torch.Tensor,
        added: Parts | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        paged_step: PagedStep,
    ) -> Parts:
        """What is to be added to `residual` `[rows, hidden]`, to which `added` and the layer's attention have been
        added by then."""
        kv, slots, overlap = paged_step.kv.layers[self._index], paged_step.of(self._index).slots, self._overlap
        qkv = self._product(self._qkv, add_norm(residual, added, *self._attention_norm, overlap))
        queries = rotate_write(qkv, cos, sin, slots, kv, self._query_heads, self._head_norms, overlap)
        attended = self._product(self._out, paged_step.attend(self._index, queries, self._rule).flatten(1))
        gate_up = self._product(self._gate_up, add_norm(residual, attended, *self._mlp_norm, overlap))
        return self._product(self._down, silu_mul(gate_up, residual.dtype, overlap))

    def entering(self, residual: torch.Tensor, added: Parts | None, *rest: object) -> torch.Tensor:
        """What goes into the layer, `[rows, hidden]`."""
        if added is None:
            return residual
        sums = added.sums.sum(0)
        return (residual + (sums if added.bias is None else sums + added.bias)).to(residual.dtype)

    def _product(self, linear: nn.Module, rows: torch.Tensor) -> Parts:
        if isinstance(linear, TritonLinear):
            return linear.partial(rows, self._overlap)
        return Parts(linear(rows).unsqueeze(0))


class CudaDecoder(nn.Module):
    """Embeddings, layers and the last norm."""

    def __init__(self, decoder: nn.Module, make_linear: MakeLinear, overlap: bool) -> None:
        """Takes the layers of `decoder` apart, one after the other: of one layer at most there are two copies."""
        super().__init__()
        self.embed_tokens = decoder.embed_tokens
        self.rotary_emb = decoder.rotary_emb
        self.layers = decoder.layers
        for index in range(len(self.layers)):
            self.layers[index] = CudaDecoderLayer(self.layers[index], make_linear, overlap)
        self._norm = weight_and_epsilon(decoder.norm)
        self._overlap = overlap

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, paged_step: PagedStep, **kwargs: object
    ) -> BaseModelOutputWithPast:
        """Tokens and their positions `[1, rows]`."""
        embeddings = self.embed_tokens(input_ids)
        cos, sin = self._rotations(embeddings, position_ids)
        residual, added = embeddings[0], None
        for layer in self.layers:
            added = layer(residual, added, cos, sin, paged_step)
        normed = add_norm(residual, added, *self._norm, self._overlap)
        return BaseModelOutputWithPast(last_hidden_state=normed.unsqueeze(0))

    def _rotations(self, embeddings: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rope = self.rotary_emb
        return rotations(position_ids[0], rope.inv_freq, rope.attention_scaling, embeddings.dtype, self._overlap)


def fuse_decoder(
    model: PreTrainedModel, make_linear: MakeLinear = lambda linear: linear, overlap: bool | None = None
) -> bool:
    """Replaces the decoder of a model of a known family, in place. False, and nothing replaced, where the model is of
    another structure. `overlap`: whether kernels do, None: where the model's device can have it."""
    decoder = model.base_model
    if overlap is None:
        overlap = overlaps(model.device)
    for family in families_of(model):
        if type(decoder) is family.decoder and all(_fits(layer, family) for layer in decoder.layers):
            setattr(model, model.base_model_prefix, CudaDecoder(decoder, make_linear, overlap))
            return True
    return False


def _fits(layer: nn.Module, family: FamilyClasses) -> bool:
    if type(layer) is not family.layer or type(layer.self_attn) is not family.attention:
        return False
    if type(layer.mlp) is not family.mlp:
        return False  # experts
    return type(layer.mlp.act_fn) in SILU


def _made(linear: nn.Linear | QuantizedLinear | SummedLinear, make_linear: MakeLinear) -> nn.Module:
    """Of a layer that ranks share, this rank's part."""
    if isinstance(linear, SummedLinear):
        return SummedLinear(make_linear(linear.part), linear.ranks)
    return make_linear(linear)
