"""Decoder layers of the Llama kind in fewer and larger operations, on a CPU and on a GPU.

The weights and the mathematics are those of transformers' own modules. Linear layers that read the same rows become
one, and rotation and norm take one or two operations where eager code takes ten. The norm is torch's own, which adds up
a row in one order however many there are; the modules' mean over a row does not on a GPU (docs/exactness.md). It takes
the place of every plain RMSNorm. A model of another structure keeps its other modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from torch import nn
from transformers import PreTrainedModel

from spool.engine.attention.backends import AttentionRule
from spool.engine.attention.paged_step import PagedStep
from spool.engine.cpu.experts import replace_experts
from spool.engine.cpu.kernels import CpuKernels
from spool.engine.cpu.linear import kernel_linear, replace_linears
from spool.engine.layers.families import FamilyClasses, families_of
from spool.engine.layers.linear import joined

_TRIED_ROWS = 3

MakeLinear = Callable[[nn.Linear], nn.Module]


class JoinedAttention(nn.Module):
    """Attention with half-split rotary positions over paged KV; `q_norm` and `k_norm` where the model has them."""

    def __init__(self, attention: nn.Module, make_linear: MakeLinear) -> None:
        super().__init__()
        self._layer = attention.layer_idx
        self._head_dim = attention.head_dim
        self._rule = AttentionRule(attention.scaling, getattr(attention, "sliding_window", None))
        self._query_heads = attention.q_proj.out_features // self._head_dim
        self._rotated_heads = self._query_heads + attention.k_proj.out_features // self._head_dim
        self._qkv = make_linear(joined([attention.q_proj, attention.k_proj, attention.v_proj]))
        self._out = make_linear(attention.o_proj)
        self.q_norm = _fused_norm(getattr(attention, "q_norm", None))
        self.k_norm = _fused_norm(getattr(attention, "k_norm", None))

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
        output = paged_step.attend(self._layer, queries, self._rule)
        return self._out(output.flatten(1)).unsqueeze(0), None


class JoinedMlp(nn.Module):
    """Gate and up projection in one."""

    def __init__(self, mlp: nn.Module, make_linear: MakeLinear) -> None:
        super().__init__()
        self._gate_up = make_linear(joined([mlp.gate_proj, mlp.up_proj]))
        self._down = make_linear(mlp.down_proj)
        self._activation = mlp.act_fn

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(rows).chunk(2, dim=-1)
        return self._down(self._activation(gate) * up)


class FusedRmsNorm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        """Of one that `is_plain_rms_norm`."""
        super().__init__()
        self.weight = norm.weight
        self._epsilon = _epsilon(norm)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows, self.weight.shape, self.weight, self._epsilon)


@torch.inference_mode()
def is_plain_rms_norm(module: nn.Module) -> bool:
    """Whether the module is an RMSNorm by its name, and multiplies normed rows by its weight and does nothing else."""
    if not type(module).__name__.endswith("RMSNorm") or _epsilon(module) is None:
        return False
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return False
    exact = copy.deepcopy(module).float()
    rows = torch.randn(_TRIED_ROWS, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device)
    try:
        # Small rows show what is added to their mean square.
        return all(
            torch.allclose(exact(part), FusedRmsNorm(exact)(part), rtol=1e-4, atol=1e-6) for part in (rows, rows * 1e-3)
        )
    # Some take a gate as well as the rows.
    except (TypeError, AttributeError, RuntimeError):
        return False


def _epsilon(norm: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        if isinstance(value := getattr(norm, name, None), float):
            return value
    return None


def _fused_norm(norm: nn.Module | None) -> nn.Module | None:
    return norm if norm is None or not is_plain_rms_norm(norm) else FusedRmsNorm(norm)


def join_layers(model: PreTrainedModel, kernels: CpuKernels | None) -> None:
    """Replaces the parts of known families in a model, and plain RMSNorms of any, in place; with the `kernels` of a
    CPU, experts and all linear layers, too."""
    families = families_of(model)
    make_linear: MakeLinear = (
        (lambda linear: linear) if kernels is None else (lambda linear: kernel_linear(linear, kernels))
    )
    for module in list(model.modules()):
        for name, child in module.named_children():
            replacement = _replacement(child, families, make_linear)
            if replacement is not None:
                setattr(module, name, replacement)
    if kernels is not None:
        replace_experts(model, kernels)
        replace_linears(model, kernels)


def _replacement(module: nn.Module, families: Sequence[FamilyClasses], make_linear: MakeLinear) -> nn.Module | None:
    kind = type(module)
    if any(kind is family.attention for family in families):
        return JoinedAttention(module, make_linear)
    if any(kind is family.mlp for family in families):
        return JoinedMlp(module, make_linear)
    if is_plain_rms_norm(module):
        return FusedRmsNorm(module)
    return None
