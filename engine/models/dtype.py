"""Which dtype a model is computed in where the settings leave the choice open."""

from __future__ import annotations

import torch

from spool.engine.cpu.linear import can_prepack

AUTO = "auto"

COMPUTED = (torch.bfloat16, torch.float16, torch.float32)
# Of CUDA's compute capability: the first GPUs that multiply bfloat16.
_BFLOAT16_GPUS = (8, 0)


def best_dtype(checkpoint: torch.dtype, device: torch.device, has_kernels: bool) -> tuple[torch.dtype, str]:
    """The checkpoint's own dtype where `device` computes it well, otherwise what is fastest there; and why.

    `has_kernels`: whether the CPU kernels were built for the checkpoint's dtype.
    """
    if checkpoint not in COMPUTED:
        return torch.float32 if device.type == "cpu" else torch.bfloat16, f"the checkpoint has {dtype_name(checkpoint)}"
    if device.type == "cuda":
        if checkpoint == torch.bfloat16 and torch.cuda.get_device_capability(device) < _BFLOAT16_GPUS:
            return torch.float16, "this GPU does not multiply bfloat16"
        return checkpoint, "the checkpoint's own"
    if checkpoint == torch.float32 or has_kernels:
        return checkpoint, "the checkpoint's own"
    if can_prepack(torch.empty(0, dtype=checkpoint)):
        return checkpoint, "the checkpoint's own"
    return torch.float32, f"without CPU kernels, {dtype_name(checkpoint)} takes longer here"


def dtype_name(dtype: torch.dtype) -> str:
    """As settings and messages name it."""
    return str(dtype).removeprefix("torch.")
