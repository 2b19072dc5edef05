"""Decoders by their description (engine/layers/description.py) for a CPU, out of kernels.

The weights and the mathematics are those of transformers' own modules; rounding to 16 bits is less frequent. Decoders
without a description, or of sizes that the kernels do not take, are left to engine/layers/plain_norms.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from spool.engine.attention.paged_step import PagedStep
from spool.engine.cpu.attention import KernelPlan
from spool.engine.cpu.kernels import (
    LANES,
    CpuKernels,
    KernelLayerWeights,
    kernel_head_norms,
    kernel_norm,
    kernel_rule,
)
from spool.engine.cpu.linear import kernel_linear
from spool.engine.layers.describing import describe
from spool.engine.layers.description import Activation, Decoder, DecoderLayer, LayerWeights
from spool.engine.layers.rotation import RotationTable
from spool.engine.parallel.layers import SummedLinear

HEAD_MULTIPLE = 2 * LANES
"""Heads have a multiple of so many dimensions, some of them zeros."""


class KernelLayer(nn.Module):
    """A decoder layer whose linear layers are computed by kernel, as is what lies between them."""

    def __init__(self, description: DecoderLayer, weights: LayerWeights, kernels: CpuKernels) -> None:
        super().__init__()
        self.description = description
        self._kernels = kernels
        self._qkv = kernel_linear(weights.qkv, kernels)
        self._out = kernel_linear(weights.out, kernels, in_parts=True)
        self.experts = weights.experts
        if weights.up is not None and weights.down is not None:
            self._up = kernel_linear(weights.up, kernels)
            self._down = kernel_linear(weights.down, kernels, in_parts=True)

    @property
    def described(self) -> tuple[object, ...]:
        """Of what the layer computes, all but weights and sizes; at the end what Llama's has otherwise."""
        layer, heads, rule = self.description, self.description.head_norms, kernel_rule(self.description.rule)
        norms = [layer.attention_norm, layer.mlp_norm, None if heads is None else heads.queries]
        post_norms = [layer.attention_post_norm, layer.mlp_post_norm]
        epsilons = [None if norm is None else norm.epsilon for norm in norms]
        kinds = [norm is not None and (norm.centred, norm.bias is not None) for norm in norms]
        more = (
            [kind or (False, False) for kind in kinds],
            [norm and (norm.epsilon, norm.centred, norm.bias is not None) for norm in post_norms],
            (False, False) if heads is None else (heads.whole, heads.after_rotation),
            (layer.activation, layer.gated, layer.multiplier, layer.parallel, layer.rotation, bool(rule.sinks)),
        )
        return (*epsilons, rule.window, rule.scaling, rule.cap, *(() if more == _OF_LLAMA else (more,)))

    def pointers(self) -> KernelLayerWeights:
        """For a whole layer, which ends behind attention if it has experts. They point to what this object keeps."""
        layer = self.description
        weights = KernelLayerWeights(
            qkv=self._qkv.described,
            out=self._out.described,
            attention_norm=kernel_norm(layer.attention_norm),
            attention_post_norm=kernel_norm(layer.attention_post_norm),
            head_norms=kernel_head_norms(layer.head_norms),
            hidden=self._qkv.in_features,
            query_heads=layer.query_heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            parallel=layer.parallel,
            rule=kernel_rule(layer.rule),
            multiplier=layer.multiplier,
        )
        if layer.activation is not None:
            weights.up, weights.down = self._up.described, self._down.described
            weights.mlp_norm, weights.mlp_post_norm = kernel_norm(layer.mlp_norm), kernel_norm(layer.mlp_post_norm)
            weights.inner = self._down.in_features
            weights.activation, weights.gated = layer.activation, layer.gated
        return weights

    def attended(
        self, residual: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], paged_step: PagedStep
    ) -> torch.Tensor:
        """What attention makes of `residual` `[rows, hidden]`, with the `signed_rotation` of the rows."""
        layer, kernels = self.description, self._kernels
        kv, slots = paged_step.kv.layers[layer.index], paged_step.of(layer.index).slots
        normed = kernels.norm(residual, layer.attention_norm)
        queries = kernels.rotate_write(self._qkv(normed), rotation, slots, kv, layer.query_heads, layer.head_norms)
        return self._out(paged_step.attend(layer.index, queries, layer.rule).flatten(1))

    def add(self, residual: torch.Tensor, attended: torch.Tensor) -> None:
        """Adds to `residual`, in place, what the layer adds, of what `attended` gives of it."""
        layer, kernels = self.description, self._kernels
        normed = kernels.norm(residual, layer.mlp_norm or layer.attention_norm) if layer.parallel else None
        kernels.add(residual, attended, layer.attention_post_norm, layer.multiplier)
        self.add_mlp(residual, normed)

    def add_mlp(self, residual: torch.Tensor, normed: torch.Tensor | None = None) -> None:
        """Adds to `residual` `[rows, hidden]` what the MLP makes of `normed`, or of its norm."""
        layer, kernels = self.description, self._kernels
        if normed is None:
            normed = kernels.norm(residual, layer.mlp_norm)
        if layer.activation is not None:
            added = self._down(kernels.activate(self._up(normed), layer.activation, layer.gated))
        else:
            assert self.experts is not None, "a layer has experts or an activation"
            output = self.experts(normed.unsqueeze(0))
            added = (output[0] if isinstance(output, tuple) else output)[0].contiguous()
        kernels.add(residual, added, layer.mlp_post_norm, layer.multiplier)


_OF_LLAMA = ([(False, False)] * 3, [None, None], (False, False), (Activation.SILU, True, 1.0, False, 0, False))


class KernelDecoder(nn.Module):
    """Embeddings, all layers, and the last norm. Layers that no ranks share are one call up to the next experts: passes
    over few rows are short."""

    def __init__(self, decoder: Decoder, kernels: CpuKernels) -> None:
        super().__init__()
        self.embed_tokens = decoder.embed
        self.layers = decoder.layers
        # One after the other: of one layer at most there are two copies.
        for place, description in enumerate(decoder.descriptions):
            self.layers[place] = KernelLayer(description, decoder.weights(self.layers[place]), kernels)
        self._rotations = [RotationTable(rotation) for rotation in decoder.rotations]
        self._decoder = decoder
        self._kernels = kernels
        self._weights, self._scratch = (KernelLayerWeights * 0)(), 0
        if not any(isinstance(module, SummedLinear) for module in self.layers.modules()):
            self._weights = (KernelLayerWeights * len(self.layers))(*(layer.pointers() for layer in self.layers))
            # Layers differ in what their MLPs need.
            self._scratch = max(kernels.layer_scratch(weights) for weights in self._weights)
        self._experts = {place for place, layer in enumerate(self.layers) if layer.experts is not None}
        self._taps: dict[int, Callable[[torch.Tensor], None]] = {}

    @property
    def has_experts(self) -> bool:
        return bool(self._experts)

    @property
    def described(self) -> str:
        """Of what the decoder computes, all but weights; at the end what Llama's has otherwise."""
        decoder, (rotation, *others) = self._decoder, [rotation.described for rotation in self._rotations]
        before = None if decoder.embedding_norm is None else decoder.embedding_norm.epsilon
        norm = (decoder.norm.centred, decoder.norm.bias is not None)
        more = (norm, others, decoder.embedding_multiplier, before, decoder.head_multiplier, decoder.head_cap)
        of_llama: tuple[object, ...] = ((False, False), [], 1.0, None, 1.0, None)
        layers = [layer.described for layer in self.layers]
        return repr((layers, decoder.norm.epsilon, rotation, *(() if more == of_llama else (more,))))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def tap(self, layer: int, take: Callable[[torch.Tensor], None]) -> None:
        """`take` gets what goes into the layer in each pass, `[rows, hidden]`, which changes after the call; of the
        number behind all layers, what `normed` gives."""
        self._taps[layer] = take

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """What goes into the first layer, `[rows, hidden]`, of tokens (int64 `[rows]`)."""
        decoder, hidden_states = self._decoder, self.embed_tokens(tokens)
        if decoder.embedding_multiplier != 1.0:
            hidden_states = hidden_states * decoder.embedding_multiplier
        if decoder.embedding_norm is not None:
            hidden_states = self._kernels.norm(hidden_states, decoder.embedding_norm)
        return hidden_states

    def norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The last norm of what comes out of the last layer, `[rows, hidden]`."""
        return self._kernels.norm(hidden_states, self._decoder.norm)

    def normed(self, tokens: torch.Tensor, positions: torch.Tensor, paged_step: PagedStep) -> torch.Tensor:
        """What the head multiplies, `[rows, hidden]`, of tokens at their positions (int64 `[rows]`). Raises TypeError
        where the pass attends otherwise than by kernel, MemoryError."""
        hidden_states = self.embedded(tokens)
        self.add_layers(hidden_states, positions, paged_step)
        rows = self.norm(hidden_states)
        if (take := self._taps.get(len(self.layers))) is not None:
            take(rows)
        return rows

    def logits(self, products: torch.Tensor) -> torch.Tensor:
        """Of the head's products, of the same shape."""
        decoder = self._decoder
        if decoder.head_multiplier == 1.0 and decoder.head_cap is None:
            return products
        return self._kernels.cap(products, decoder.head_multiplier, decoder.head_cap)

    def rotation(self, layer: KernelLayer, positions: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer rotates by at positions (int64 `[rows]`) below `longest`."""
        return self._rotations[layer.description.rotation].of(positions, longest)

    def add_layers(self, hidden_states: torch.Tensor, positions: torch.Tensor, paged_step: PagedStep) -> None:
        """Adds to `hidden_states` `[rows, hidden]`, in place, what the layers add."""
        plans = [group.plan for group in paged_step.groups if isinstance(group.plan, KernelPlan)]
        if len(plans) < len(paged_step.groups):
            raise TypeError(f"the pass attends by {type(paged_step.groups[0].plan).__name__}, must be by kernel")
        rotations = [rotation.of(positions, plans[0].longest) for rotation in self._rotations]
        kv, descriptions, count = paged_step.kv, self._decoder.descriptions, len(self.layers)
        # Layers of a group and a rotation share what a call is told of the pass.
        kinds = [(group, layer.rotation) for group, layer in zip(kv.group_of, descriptions, strict=True)]
        scratch = torch.empty(len(positions) * self._scratch, dtype=torch.uint8)
        passes = {
            (group, rotation): plans[group].layer_pass(kv, paged_step.groups[group].slots, rotations[rotation], scratch)
            for group, rotation in set(kinds)
        }
        starts = [
            place
            for place in range(count)
            if place == 0 or kinds[place] != kinds[place - 1] or place - 1 in self._experts or place in self._taps
        ]
        for first, end in pairwise((*starts, count)):
            if (take := self._taps.get(first)) is not None:
                take(hidden_states)
            if self._weights:
                of_part = _part(kv.addresses, first, end), _part(self._weights, first, end)
                self._kernels.layers(hidden_states, *of_part, passes[kinds[first]])
                if end - 1 in self._experts:
                    self.layers[end - 1].add_mlp(hidden_states)
                continue
            for layer in self.layers[first:end]:
                layer.add(hidden_states, layer.attended(hidden_states, rotations[kinds[first][1]], paged_step))


def _part(array: ctypes.Array[Any], first: int, end: int) -> ctypes.Array[Any]:
    """The entries from `first` to `end`, not copied."""
    kind = array._type_
    return (kind * (end - first)).from_buffer(array, first * ctypes.sizeof(kind))


def fuse_decoder(model: PreTrainedModel, kernels: CpuKernels) -> None:
    """Replaces the decoder of a model on a CPU by one of kernels, in place. A model without a description, or with
    sizes that the kernels do not take, stays as it is."""
    if not kernels.takes(model.get_input_embeddings().weight):
        return
    decoder = describe(model, LANES, HEAD_MULTIPLE)
    if decoder is not None:
        setattr(model, model.base_model_prefix, KernelDecoder(decoder, kernels))
