"""Plain RMSNorms of decoders without a description, by torch's own norm: it adds up a row in one order however many
rows there are. The modules' mean over a row does not on a GPU (docs/exactness.md)."""

from __future__ import annotations

import copy

import torch
from torch import nn

_TRIED_ROWS = 3


@torch.inference_mode()
def is_plain_rms_norm(module: nn.Module) -> bool:
    """Whether the module is an RMSNorm by its name, and multiplies normed rows by its weight and does nothing else."""
    if not type(module).__name__.endswith("RMSNorm") or epsilon_of(module) is None:
        return False
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return False
    exact = copy.deepcopy(module).float()
    rows = torch.randn(_TRIED_ROWS, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device)
    try:
        # Small rows show what is added to their mean square.
        return all(
            torch.allclose(exact(part), _fused(exact)(part), rtol=1e-4, atol=1e-6) for part in (rows, rows * 1e-3)
        )
    # Some take a gate as well as the rows.
    except (TypeError, AttributeError, RuntimeError):
        return False


def epsilon_of(norm: nn.Module) -> float | None:
    """None where it does not tell."""
    for name in ("variance_epsilon", "eps"):
        if isinstance(value := getattr(norm, name, None), float | int):
            return float(value)
    return None


def _fused(norm: nn.Module) -> nn.RMSNorm:
    """Of one that `is_plain_rms_norm`, with its weight."""
    fused = nn.RMSNorm(norm.weight.shape, epsilon_of(norm), device="meta")
    fused.weight = norm.weight
    return fused


def replace_norms(model: nn.Module) -> None:
    """Replaces plain RMSNorms in place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if is_plain_rms_norm(child):
                setattr(module, name, _fused(child))
