"""Plain RMSNorms of decoders without a description, by torch's own norm: it adds up a row in one order however many
rows there are. The modules' mean over a row does not on a GPU (docs/exactness.md)."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from torch import nn

_TRIED_ROWS = 3


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


def replace_norms(model: nn.Module) -> None:
    """Replaces plain RMSNorms in place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if is_plain_rms_norm(child):
                setattr(module, name, FusedRmsNorm(child))
