"""Decoders by their description (engine/layers/description.py) for a GPU: per layer four linear layers, attention, and
four kernels for what lies between them (engine/cuda/triton_rows.py).

Kernels overlap where the GPU allows it: one begins while the one before it ends.

The weights and the mathematics are those of transformers' own modules; rounding to 16 bits is less frequent. What
follows the last norm is left to them, and decoders without a description are, but for their plain norms
(engine/layers/plain_norms.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from spool.engine.attention.paged_step import PagedStep
from spool.engine.cuda.triton_product import Parts, TritonLinear, overlaps
from spool.engine.cuda.triton_rows import Added, NormOfHeads, activate, add_norm, rotate_write, rotations
from spool.engine.layers.describing import describe
from spool.engine.layers.description import Decoder, DecoderLayer, LayerWeights
from spool.engine.parallel.layers import SummedLinear
from spool.engine.quantization.layers import QuantizedLinear

MakeLinear = Callable[[nn.Linear | QuantizedLinear], nn.Module]
"""Makes what computes a linear layer, `[rows, in]` to `[rows, out]`, both contiguous."""


class CudaDecoderLayer(nn.Module):
    def __init__(
        self, description: DecoderLayer, weights: LayerWeights, make_linear: MakeLinear, overlap: bool
    ) -> None:
        super().__init__()
        self.description = description
        self._head_norm = None if description.head_norms is None else NormOfHeads.of(description.head_norms)
        self._qkv = _made(weights.qkv, make_linear)
        self._out = _made(weights.out, make_linear)
        self.experts = weights.experts
        if weights.up is not None and weights.down is not None:
            self._up = _made(weights.up, make_linear)
            self._down = _made(weights.down, make_linear)
        self._overlap = overlap

    def forward(
        self,
        residual: torch.Tensor,
        added: Added | None,
        angles: Sequence[tuple[torch.Tensor, torch.Tensor]],
        paged_step: PagedStep,
    ) -> Added:
        """What is to be added to `residual` `[rows, hidden]`, to which `added` and the layer's attention have been
        added by then. `angles`: the `rotations` of the decoder."""
        layer, overlap = self.description, self._overlap
        kv, slots = paged_step.kv.layers[layer.index], paged_step.of(layer.index).slots
        normed = add_norm(residual, added, layer.attention_norm, overlap)
        qkv, (cos, sin) = self._product(self._qkv, normed), angles[layer.rotation]
        queries = rotate_write(qkv, cos, sin, slots, kv, layer.query_heads, self._head_norm, overlap)
        attended = self._product(self._out, paged_step.attend(layer.index, queries, layer.rule).flatten(1))
        attention = Added(attended, layer.attention_post_norm, layer.multiplier)
        rows = add_norm(residual, attention, layer.mlp_norm, overlap, of_residual=layer.parallel)
        if layer.parallel and layer.mlp_norm is None:
            rows = normed
        return Added(self._mlp(rows), layer.mlp_post_norm, layer.multiplier)

    def entering(self, residual: torch.Tensor, added: Added | None, *rest: object) -> torch.Tensor:
        """What goes into the layer, `[rows, hidden]`."""
        sums = residual.clone()
        add_norm(sums, added, self.description.attention_norm, self._overlap)
        return sums

    def _mlp(self, rows: torch.Tensor) -> Parts:
        layer = self.description
        if self.experts is not None:
            output = self.experts(rows.unsqueeze(0))
            return Parts((output[0] if isinstance(output, tuple) else output).contiguous())
        assert layer.activation is not None, "a layer has experts or an activation"
        up = self._product(self._up, rows)
        return self._product(self._down, activate(up, rows.dtype, layer.activation, layer.gated, self._overlap))

    def _product(self, linear: nn.Module, rows: torch.Tensor) -> Parts:
        if isinstance(linear, TritonLinear):
            return linear.partial(rows, self._overlap)
        return Parts(linear(rows).unsqueeze(0))


class CudaDecoder(nn.Module):
    """Embeddings, layers and the last norm."""

    def __init__(self, decoder: Decoder, make_linear: MakeLinear, overlap: bool) -> None:
        """Takes the layers of `decoder` apart, one after the other: of one layer at most there are two copies."""
        super().__init__()
        self.embed_tokens = decoder.embed
        self.layers = decoder.layers
        for place, description in enumerate(decoder.descriptions):
            weights = decoder.weights(self.layers[place])
            self.layers[place] = CudaDecoderLayer(description, weights, make_linear, overlap)
        self._decoder = decoder
        self._overlap = overlap

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, paged_step: PagedStep, **kwargs: object
    ) -> MoeModelOutputWithPast:
        """Tokens and their positions `[1, rows]`."""
        decoder, overlap, added = self._decoder, self._overlap, None
        residual = self.embed_tokens(input_ids)[0]
        if decoder.embedding_multiplier != 1.0:
            residual = residual * decoder.embedding_multiplier
        residual = add_norm(residual, None, decoder.embedding_norm, overlap)
        angles = [rotations(position_ids[0], rotation, overlap) for rotation in decoder.rotations]
        for layer in self.layers:
            added = layer(residual, added, angles, paged_step)
        normed = add_norm(residual, added, decoder.norm, overlap)
        return MoeModelOutputWithPast(last_hidden_state=normed.unsqueeze(0))


def fuse_decoder(model: PreTrainedModel, make_linear: MakeLinear = lambda linear: linear) -> bool:
    """Replaces the decoder of a model that has a description, in place. False, and nothing replaced, where it has
    none."""
    decoder = describe(model)
    if decoder is not None:
        setattr(model, model.base_model_prefix, CudaDecoder(decoder, make_linear, overlaps(model.device)))
    return decoder is not None


def _made(linear: nn.Module, make_linear: MakeLinear) -> nn.Module:
    """Of a layer that ranks share, this rank's part."""
    if isinstance(linear, SummedLinear):
        return SummedLinear(make_linear(linear.part), linear.ranks)
    return make_linear(linear)
