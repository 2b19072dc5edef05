"""The experts of a sparse layer, by kernels."""

from __future__ import annotations

import torch
from torch import nn

from engine.cpu.kernels import LANES, CpuKernels
from engine.cpu.linear import KernelLinear
from engine.models.families import SILU, linear_of


class KernelExperts(nn.Module):
    """What a sparse block of the Qwen3-MoE kind computes: each row goes through a few of its experts.

    How many rows an expert computes at once depends on who shares the pass. The kernels give a row the same bits in any
    company, and what its experts give is added up in their order, so that exact mode has such models, too.
    """

    def __init__(self, block: nn.Module, kernels: CpuKernels) -> None:
        super().__init__()
        router, experts = block.gate, block.experts
        self._kernels = kernels
        self._chosen = router.top_k
        self._normalised = router.norm_topk_prob
        self._router = KernelLinear(linear_of(router.weight), kernels)
        self._gate_up = nn.ModuleList(KernelLinear(linear_of(weight), kernels) for weight in experts.gate_up_proj)
        self._down = nn.ModuleList(KernelLinear(linear_of(weight), kernels) for weight in experts.down_proj)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[1, rows, hidden]` to the same."""
        rows = hidden_states[0]
        chances = torch.softmax(self._router(rows), dim=-1, dtype=torch.float32)
        shares, chosen = chances.topk(self._chosen, dim=-1)
        if self._normalised:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        shares = shares.to(rows.dtype)
        total = torch.zeros_like(rows)
        for expert in chosen.unique().tolist():
            which, place = (chosen == expert).nonzero(as_tuple=True)
            inner = self._kernels.silu_mul(self._gate_up[expert](rows[which]))
            total[which] += self._down[expert](inner) * shares[which, place, None]
        return total.unsqueeze(0)


def runs_by_kernel(block: nn.Module, kernels: CpuKernels) -> bool:
    """Whether the kernels take all of a sparse block."""
    experts = block.experts
    return (
        type(experts.act_fn) in SILU
        and experts.down_proj.shape[2] % LANES == 0
        and all(kernels.multiplies(w) for w in (block.gate.weight, experts.gate_up_proj[0], experts.down_proj[0]))
    )
