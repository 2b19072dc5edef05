"""Linear layers whose weights lie in memory the way oneDNN's CPU kernels read them.

Packing once takes a third off a small pass, and the packed kernel gave a row the same bits in calls of one row and of
many, which the plain one did not (docs/exactness.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

# The row count that weights are packed for; it chooses a layout, not a limit.
_TYPICAL_ROWS = 16


class PackedLinear(nn.Module):
    """Computes what `linear` does, from weights that `linear` need not keep."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # Not a buffer: nobody can copy, save or move weights in this layout.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_ROWS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")


def joined(layers: Sequence[nn.Linear]) -> nn.Linear:
    """One layer whose outputs are those of `layers`, one after the other. They have a bias all or none."""
    first = layers[0]
    with torch.no_grad():
        joined = nn.Linear(1, 1, bias=first.bias is not None)
        joined.in_features = first.in_features
        joined.out_features = sum(layer.out_features for layer in layers)
        joined.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
        if first.bias is not None:
            joined.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    return joined


def pack_linears(model: nn.Module) -> None:
    """Replaces the linear layers of a bfloat16 model on a CPU where this build of torch can pack them."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and can_pack(child.weight):
                setattr(module, name, PackedLinear(child))


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this build of torch packs weights like this one, on its device and in its dtype."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
