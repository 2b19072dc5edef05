"""Linear layers whose weights lie in memory the way that CPU kernels read them: Spool's own, or oneDNN's.

Prepacked weights take a third off a small pass. Their kernels also give a row the same bits in calls of one row and of
many, which torch's plain kernel does not (docs/exactness.md).
"""

from __future__ import annotations

import torch
from torch import nn

from spool.engine.cpu.kernels import CpuKernels, LinearWeights, Panels
from spool.engine.layers.linear import apart, summed_parts
from spool.engine.parallel.layers import SummedLinear
from spool.engine.quantization.layers import QuantizedEmbedding, QuantizedLinear

# The row count that oneDNN lays weights out for; more or fewer rows work, too.
_TYPICAL_ROWS = 16


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
        self._kernels = kernels
        self._panels = panels

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens `[...]` to `[..., embedding_dim]`."""
        rows = self._kernels.expanded_rows(self._panels, tokens.reshape(-1).contiguous(), self.embedding_dim)
        return rows.view(*tokens.shape, -1)


class PrepackedLinear(nn.Module):
    """Computes what `linear` does with oneDNN, from weights that `linear` need not keep."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # Not a buffer: weights in this layout cannot be copied, saved or moved.
        self._prepacked = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_ROWS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return torch.ops.mkldnn._linear_pointwise(rows, self._prepacked, self.bias, "none", [], "")


def prepack_linear(
    linear: nn.Linear | QuantizedLinear | SummedLinear, kernels: CpuKernels | None, in_parts: bool = False
) -> nn.Module:
    """By `kernels`, if they take this weight; otherwise by oneDNN, or `linear` itself where that cannot either. Of a
    layer that ranks share, this rank's part. With `in_parts`, inputs are summed as several ranks do."""
    if isinstance(linear, SummedLinear):
        parts = summed_parts(linear.part.in_features, linear.ranks.size) if in_parts else 1
        return SummedLinear(_prepacked(linear.part, kernels, parts, exact=True), linear.ranks)
    return _prepacked(linear, kernels, summed_parts(linear.in_features) if in_parts else 1)


def _prepacked(
    linear: nn.Linear | QuantizedLinear, kernels: CpuKernels | None, parts: int, exact: bool = False
) -> nn.Module:
    if kernels is not None and (isinstance(linear, QuantizedLinear) or kernels.multiplies(linear.weight)):
        return KernelLinear(linear, kernels, None, parts, exact)
    if isinstance(linear, QuantizedLinear) or not can_prepack(linear.weight):
        return linear
    return PrepackedLinear(linear)


def prepack_linears(model: nn.Module, kernels: CpuKernels | None) -> None:
    """Replaces the linear layers of a model on a CPU where `kernels` or this build of torch take them, and what is
    quantised."""
    panels: dict[int, Panels] = {}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if kernels is not None and isinstance(child, QuantizedLinear | QuantizedEmbedding):
                # A head may share its weight with the embedding.
                address = child.codes.data_ptr()
                if address not in panels:
                    panels[address] = kernels.to_quantized_panels(child.quantized)
                replacement = KernelLinear if isinstance(child, QuantizedLinear) else KernelEmbedding
                setattr(module, name, replacement(child, kernels, panels[address]))
            elif type(child) is nn.Linear and can_prepack(child.weight, kernels):
                setattr(module, name, prepack_linear(child, kernels))


def can_prepack(weight: torch.Tensor, kernels: CpuKernels | None = None) -> bool:
    """Whether `kernels`, or this build of torch, prepack weights like this one, on its device and in its dtype."""
    if kernels is not None and kernels.multiplies(weight):
        return True
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
