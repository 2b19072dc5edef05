"""Whole decoder layers of the Llama kind for a CPU, out of kernels.

The weights and the mathematics are those of transformers' own modules; rounding to 16 bits is less frequent. Layers of
another structure, or of sizes that the kernels do not take, are left to engine/layers/joined_layers.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from spool.engine.attention.paged_step import PagedStep
from spool.engine.cpu.attention import KernelPlan
from spool.engine.cpu.kernels import LANES, CpuKernels, LayerWeights, kernel_rule
from spool.engine.cpu.linear import KernelLinear, kernel_linear
from spool.engine.layers.families import SILU, LlamaLayer, families_of, weight_and_epsilon
from spool.engine.layers.rotation import RotationTable
from spool.engine.parallel.layers import SummedLinear


class FusedDecoderLayer(LlamaLayer):
    """Four linear layers by kernel, and kernels for the operations between them."""

    def __init__(self, layer: nn.Module, kernels: CpuKernels) -> None:
        super().__init__(
            layer,
            lambda linear: kernel_linear(linear, kernels),
            lambda linear: kernel_linear(linear, kernels, in_parts=True),
        )
        self._kernels = kernels

    @property
    def has_kernel_linears(self) -> bool:
        """Of a layer that ranks share, this rank's parts."""
        linears = (self._qkv, self._out, self._gate_up, self._down)
        return all(isinstance(getattr(linear, "part", linear), KernelLinear) for linear in linears)

    @property
    def is_whole(self) -> bool:
        """Whether no other ranks share the layer."""
        return not isinstance(self._out, SummedLinear)

    @property
    def described(self) -> tuple[object, ...]:
        """Of what the layer computes, all but weights and sizes."""
        rule, head_norms = kernel_rule(self._rule), self._head_norms
        epsilons = self._attention_norm[1], self._mlp_norm[1], None if head_norms is None else head_norms[2]
        return (*epsilons, rule.window, rule.scaling, rule.cap)

    def weights(self) -> LayerWeights:
        """For whole layers by kernel. They point to what this layer keeps alive."""
        weights = LayerWeights(
            qkv=self._qkv.described,
            out=self._out.described,
            gate_up=self._gate_up.described,
            down=self._down.described,
            attention_norm=self._attention_norm[0].data_ptr(),
            mlp_norm=self._mlp_norm[0].data_ptr(),
            hidden=self._qkv.in_features,
            inner=self._down.in_features,
            query_heads=self._query_heads,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            attention_epsilon=self._attention_norm[1],
            mlp_epsilon=self._mlp_norm[1],
            rule=kernel_rule(self._rule),
        )
        if self._head_norms is not None:
            query_norm, key_norm, weights.head_epsilon = self._head_norms
            weights.query_norm, weights.key_norm = query_norm.data_ptr(), key_norm.data_ptr()
        return weights

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged_step: PagedStep,
        **kwargs: object,
    ) -> torch.Tensor:
        """`[1, rows, hidden]`, which becomes the sum of residuals, and the cosines and sines of the rows' positions."""
        self.add(hidden_states[0], paged_step.rotation(position_embeddings), paged_step)
        return hidden_states

    def add(self, residual: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], paged_step: PagedStep) -> None:
        """Adds to `residual` `[rows, hidden]` what the layer adds, with the `signed_rotation` of the rows."""
        kernels, layer = self._kernels, paged_step.kv.layers[self._index]
        rows = kernels.norm(residual, *self._attention_norm)
        slots = paged_step.of(self._index).slots
        queries = kernels.rotate_write(self._qkv(rows), rotation, slots, layer, self._query_heads, self._head_norms)
        attended = self._out(paged_step.attend(self._index, queries, self._rule).flatten(1))
        rows = kernels.add_norm(residual, attended, *self._mlp_norm)
        residual.add_(self._down(kernels.silu_mul(self._gate_up(rows))))


class KernelDecoder(nn.Module):
    """Embeddings, all layers, and the last norm. Layers that no ranks share are one call: passes over few rows are
    short."""

    def __init__(self, decoder: nn.Module, kernels: CpuKernels) -> None:
        """`decoder` has layers that are fused, with linear layers by kernel."""
        super().__init__()
        self.embed_tokens = decoder.embed_tokens
        self.layers = decoder.layers
        self._rotations = RotationTable(decoder.rotary_emb, kernels.dtype)
        self._norm = weight_and_epsilon(decoder.norm)
        self._kernels = kernels
        self._weights, self._scratch = (LayerWeights * 0)(), 0
        if all(layer.is_whole for layer in self.layers):
            self._weights = (LayerWeights * len(self.layers))(*(layer.weights() for layer in self.layers))
            self._scratch = kernels.layer_scratch(self._weights[0])
        self._taps: dict[int, Callable[[torch.Tensor], None]] = {}

    @property
    def described(self) -> str:
        """Of what the layers compute, all but weights."""
        layers = [layer.described for layer in self.layers]
        return repr((layers, self._norm[1], self._rotations.described))

    def tap(self, layer: int, take: Callable[[torch.Tensor], None]) -> None:
        """`take` gets what goes into the layer in each pass, `[rows, hidden]`, which changes after the call; of the
        number behind all layers, what `normed` gives."""
        self._taps[layer] = take

    def normed(self, tokens: torch.Tensor, positions: torch.Tensor, paged_step: PagedStep) -> torch.Tensor:
        """What the head multiplies, `[rows, hidden]`, of tokens at their positions (int64 `[rows]`). Raises TypeError
        where the pass attends otherwise than by kernel, MemoryError."""
        hidden_states = self.embed_tokens(tokens)
        self.add_layers(hidden_states, positions, paged_step)
        rows = self._kernels.norm(hidden_states, *self._norm)
        if (take := self._taps.get(len(self.layers))) is not None:
            take(rows)
        return rows

    def add_layers(self, hidden_states: torch.Tensor, positions: torch.Tensor, paged_step: PagedStep) -> None:
        """Adds to `hidden_states` `[rows, hidden]`, in place, what the layers add."""
        plans = [group.plan for group in paged_step.groups if isinstance(group.plan, KernelPlan)]
        if len(plans) < len(paged_step.groups):
            raise TypeError(f"the pass attends by {type(paged_step.groups[0].plan).__name__}, must be by kernel")
        rotation = self._rotations.of(positions, plans[0].longest)
        if not self._weights:
            for layer in self.layers:
                layer.add(hidden_states, rotation, paged_step)
            return
        scratch = torch.empty(len(positions) * self._scratch, dtype=torch.uint8)
        kv, count = paged_step.kv, len(self._weights)
        passes = [
            plan.layer_pass(kv, group.slots, rotation, scratch)
            for plan, group in zip(plans, paged_step.groups, strict=True)
        ]
        changes = {place for place in range(1, count) if kv.group_of[place] != kv.group_of[place - 1]}
        ends = sorted({*self._taps, *changes, count})
        for first, end in zip([0, *ends], ends, strict=False):
            if end > first:
                of_part = _part(kv.addresses, first, end), _part(self._weights, first, end)
                self._kernels.layers(hidden_states, *of_part, passes[kv.group_of[first]])
            if end < count and end in self._taps:
                self._taps[end](hidden_states)


def _part(array: ctypes.Array[Any], first: int, end: int) -> ctypes.Array[Any]:
    """The entries from `first` to `end`, not copied."""
    kind = array._type_
    return (kind * (end - first)).from_buffer(array, first * ctypes.sizeof(kind))


def fuse_layers(model: PreTrainedModel, kernels: CpuKernels) -> None:
    """Replaces decoder layers of known families in a model on a CPU, in place; the whole decoder, too, where
    all of its layers run by kernel. Other layers stay as they are."""
    if not kernels.takes(model.get_input_embeddings().weight):
        return
    families = families_of(model)
    layers = {family.layer for family in families}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) in layers and _fits(child):
                setattr(module, name, FusedDecoderLayer(child, kernels))
    decoder = model.base_model
    if type(decoder) in {family.decoder for family in families} and all(
        _is_by_kernel(layer) for layer in decoder.layers
    ):
        setattr(model, model.base_model_prefix, KernelDecoder(decoder, kernels))


def _is_by_kernel(layer: nn.Module) -> bool:
    return isinstance(layer, FusedDecoderLayer) and layer.has_kernel_linears


def _fits(layer: nn.Module) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    if not hasattr(mlp, "gate_proj"):
        return False  # experts
    sizes = (attention.q_proj.in_features, attention.head_dim // 2, mlp.down_proj.in_features)
    return type(mlp.act_fn) in SILU and all(size % LANES == 0 for size in sizes)
