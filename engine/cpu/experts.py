"""The experts of sparse layers, by kernels, in all families that compute them through transformers' interface."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial

import torch
from torch import nn
from transformers import PreTrainedModel

from spool.engine.cpu.kernels import LANES, CpuKernels, load_cpu_kernels
from spool.engine.cpu.linear import KernelLinear, kernel_linear
from spool.engine.layers.description import Activation
from spool.engine.layers.experts import Experts, replace_in_block, sparse_blocks
from spool.engine.layers.linear import linear_of


class KernelExperts(nn.Module):
    """How many rows an expert computes at once depends on who shares the pass. The kernels give a row the same bits in
    any company, and what its experts give is added up in the order of its choice, so that exact mode has such models,
    too."""

    def __init__(self, experts: Experts, kernels: CpuKernels) -> None:
        super().__init__()
        self._gate_up = _linears(experts.gate_up, experts.gate_up_bias, kernels)
        self._down = _linears(experts.down, experts.down_bias, kernels)
        by_kernel = experts.has_silu and experts.down.shape[2] % LANES == 0
        self._gate = partial(kernels.activate, activation=Activation.SILU, gated=True) if by_kernel else experts.gate

    def forward(self, rows: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]` to the same; experts and their shares `[rows, top k]`. Shares and sums are in float32."""
        by_expert = chosen.flatten().argsort(stable=True)
        used, counts = (numbers.tolist() for numbers in chosen.unique(return_counts=True))
        inner = self._gate(_through(self._gate_up, used, counts, rows[by_expert // chosen.shape[1]]))
        outputs = torch.empty(len(by_expert), rows.shape[1])
        outputs[by_expert] = _through(self._down, used, counts, inner).float()
        outputs = outputs.view(*chosen.shape, -1) * shares.float().unsqueeze(-1)
        total, *others = outputs.unbind(1)
        for other in others:
            total += other
        return total.to(rows.dtype)


def replace_experts(model: PreTrainedModel, kernels: CpuKernels) -> None:
    """Replaces experts and their routers in place."""

    @cache
    def kernels_of(dtype: torch.dtype) -> CpuKernels:
        # Some routers multiply in float32.
        if dtype == kernels.dtype:
            return kernels
        return load_cpu_kernels(dtype, lambda *_: None, kernels.isa, universal=kernels.universal)

    for block in sparse_blocks(model):
        experts = KernelExperts(Experts.of(block.experts), kernels)
        replace_in_block(block, experts, lambda linear: kernel_linear(linear, kernels_of(linear.weight.dtype)))


def _linears(weights: torch.Tensor, biases: torch.Tensor | None, kernels: CpuKernels) -> nn.ModuleList:
    of_experts: Iterable[torch.Tensor | None] = [None] * len(weights) if biases is None else biases
    return nn.ModuleList(
        KernelLinear(linear_of(weight, bias), kernels) for weight, bias in zip(weights, of_experts, strict=True)
    )


def _through(linears: nn.ModuleList, used: list[int], counts: list[int], rows: torch.Tensor) -> torch.Tensor:
    """Rows, as many of each used expert as `counts` says, through the layers of their experts."""
    return torch.cat([linears[expert](part) for expert, part in zip(used, rows.split(counts), strict=True)])
