"""Decoder layers of the Llama kind in fewer and larger operations, for small passes on a CPU.

The same weights and the same mathematics as transformers' own modules: linear layers that read the same rows become
one, and rotation and norm take one or two operations where eager code takes ten. What has another structure keeps its
modules; of that, only the linear layers are packed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP, Qwen3RMSNorm

from engine.cpu_kernels import CpuKernels
from engine.packed_linear import can_pack, joined, pack_linear, pack_linears
from engine.paged_kv import PagedStep

_ATTENTIONS = (LlamaAttention, Qwen2Attention, Qwen3Attention)
_MLPS = (LlamaMLP, Qwen2MLP, Qwen3MLP)
_NORMS = (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)


class PackedAttention(nn.Module):
    """Attention with half-split rotary positions over paged KV; `q_norm` and `k_norm` where the model has them."""

    def __init__(self, attention: nn.Module, kernels: CpuKernels | None) -> None:
        super().__init__()
        self._layer = attention.layer_idx
        self._head_dim = attention.head_dim
        self._scaling = attention.scaling
        self._query_heads = attention.q_proj.out_features // self._head_dim
        self._rotated_heads = self._query_heads + attention.k_proj.out_features // self._head_dim
        self._qkv = pack_linear(joined([attention.q_proj, attention.k_proj, attention.v_proj]), kernels)
        self._out = pack_linear(attention.o_proj, kernels)
        self.q_norm = getattr(attention, "q_norm", None)
        self.k_norm = getattr(attention, "k_norm", None)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged_step: PagedStep,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        """`[1, rows, hidden]`, and the cosines and sines `[1, rows, head_dim]` of the rows' positions."""
        heads = self._qkv(hidden_states[0]).view(hidden_states.shape[1], -1, self._head_dim)
        rotated = heads[:, : self._rotated_heads]
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = rotated[:, : self._query_heads], rotated[:, self._query_heads :]
            rotated = torch.cat((self.q_norm(queries), self.k_norm(keys)), dim=1)
        cos, signed_sin = paged_step.rotation(position_embeddings)
        # In float32, for two products and a sum would round three times.
        exact = rotated.float()
        exact = torch.addcmul(exact * cos, torch.roll(exact, self._head_dim // 2, -1), signed_sin)
        rotated = exact.to(heads.dtype)
        paged_step.write(self._layer, rotated[:, self._query_heads :], heads[:, self._rotated_heads :])
        queries = rotated[:, : self._query_heads]
        output = paged_step.plan.attend(paged_step.kv.layers[self._layer], queries, self._scaling)
        return self._out(output.flatten(1)).unsqueeze(0), None


class PackedMlp(nn.Module):
    """Gate and up projection in one."""

    def __init__(self, mlp: nn.Module, kernels: CpuKernels | None) -> None:
        super().__init__()
        self._gate_up = pack_linear(joined([mlp.gate_proj, mlp.up_proj]), kernels)
        self._down = pack_linear(mlp.down_proj, kernels)
        self._activation = mlp.act_fn

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(rows).chunk(2, dim=-1)
        return self._down(self._activation(gate) * up)


class FusedRmsNorm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self._epsilon = norm.variance_epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows, self.weight.shape, self.weight, self._epsilon)


def pack_layers(model: PreTrainedModel, kernels: CpuKernels | None) -> None:
    """Replaces what is known in a bfloat16 model on a CPU, in place; any other model stays as it is."""
    if not can_pack(model.get_input_embeddings().weight):
        return
    for module in list(model.modules()):
        for name, child in module.named_children():
            replacement = _packed(child, kernels)
            if replacement is not None:
                setattr(module, name, replacement)
    pack_linears(model, kernels)


def _packed(module: nn.Module, kernels: CpuKernels | None) -> nn.Module | None:
    # The very classes: a subclass may compute something else.
    kind = type(module)
    if kind in _ATTENTIONS:
        return PackedAttention(module, kernels)
    if kind in _MLPS:
        return PackedMlp(module, kernels)
    if kind in _NORMS:
        return FusedRmsNorm(module)
    return None
