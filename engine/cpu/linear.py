"""Linear layers whose weights lie in memory the way that CPU kernels read them."""

from __future__ import annotations

import torch
from torch import nn

from spool.engine.cpu.kernels import CpuKernels, LinearWeights, Panels
from spool.engine.layers.linear import apart, summed_parts
from spool.engine.parallel.layers import SummedLinear
from spool.engine.quantization.layers import QuantizedEmbedding, QuantizedLinear, scaled


class KernelLinear(nn.Module):
    """Computes what `linear` does with Spool's kernel, which adds up each output in one order."""

    def __init__(
        self,
        linear: nn.Linear | QuantizedLinear,
        kernels: CpuKernels,
        panels: Panels | None = None,
        parts: int = 1,
        exact: bool = False,
    ) -> None:
        """`panels`: of the linear's weight, where they are made already. `parts` and `exact` as kernels have them."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._kernels = kernels
        if panels is None and isinstance(linear, QuantizedLinear):
            panels = kernels.to_quantized_panels(linear.quantized)
        self._panels = panels or kernels.to_panels(linear.weight.detach())
        self._padded_bias = None if linear.bias is None else kernels.padded_bias(linear.bias.detach())
        self._sums = parts, exact

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        flat = rows.reshape(-1, self.in_features).contiguous()
        outputs = self._kernels.linear(flat, self._panels, self._padded_bias, self.out_features, *self._sums)
        if self.out_features == 1:
            # The gate of a shared expert, whose sigmoid is taken.
            outputs = apart(outputs)
        return outputs.view(*rows.shape[:-1], self.out_features)

    @property
    def described(self) -> LinearWeights:
        """For whole layers by kernel. Points to what this layer keeps alive."""
        return self._panels.described(self._padded_bias, *self._sums)


class KernelEmbedding(nn.Module):
    """The embedding of a quantised weight, from the panels that the head may share."""

    def __init__(self, embedding: QuantizedEmbedding, kernels: CpuKernels, panels: Panels) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.weight = embedding.weight
        self._scale = embedding.scale
        self._kernels = kernels
        self._panels = panels

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens `[...]` to `[..., embedding_dim]`."""
        rows = self._kernels.expanded_rows(self._panels, tokens.reshape(-1).contiguous(), self.embedding_dim)
        return scaled(rows, self._scale).view(*tokens.shape, -1)


def kernel_linear(
    linear: nn.Linear | QuantizedLinear | SummedLinear, kernels: CpuKernels, in_parts: bool = False
) -> nn.Module:
    """By `kernels`; of a layer that ranks share, this rank's part. With `in_parts`, inputs are summed as several ranks
    do."""
    if isinstance(linear, SummedLinear):
        parts = summed_parts(linear.part.in_features, linear.ranks.size) if in_parts else 1
        return SummedLinear(KernelLinear(linear.part, kernels, None, parts, exact=True), linear.ranks)
    return KernelLinear(linear, kernels, None, summed_parts(linear.in_features) if in_parts else 1)


def replace_linears(model: nn.Module, kernels: CpuKernels) -> None:
    """Replaces the linear layers of a model on a CPU, and embeddings that are quantised, in place."""
    panels: dict[int, Panels] = {}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, QuantizedLinear | QuantizedEmbedding):
                # A head may share its weight with the embedding.
                address = child.codes.data_ptr()
                if address not in panels:
                    panels[address] = kernels.to_quantized_panels(child.quantized)
                replacement = KernelLinear if isinstance(child, QuantizedLinear) else KernelEmbedding
                setattr(module, name, replacement(child, kernels, panels[address]))
            elif type(child) is nn.Linear and kernels.takes(child.weight):
                setattr(module, name, kernel_linear(child, kernels))
