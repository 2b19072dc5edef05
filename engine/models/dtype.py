"""Which dtype a model is computed in where the settings leave the choice open."""

from __future__ import annotations

import torch

AUTO = "auto"

COMPUTED = (torch.bfloat16, torch.float16, torch.float32)
# Of CUDA's compute capability: the first GPUs that multiply bfloat16.
_BFLOAT16_GPUS = (8, 0)


def best_dtype(checkpoint: torch.dtype, device: torch.device) -> tuple[torch.dtype, str]:
    """The checkpoint's own dtype where `device` computes it, otherwise what is fastest there; and why."""
    if checkpoint not in COMPUTED:
        return torch.float32 if device.type == "cpu" else torch.bfloat16, f"the checkpoint has {dtype_name(checkpoint)}"
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < _BFLOAT16_GPUS
    if checkpoint == torch.bfloat16 and old:
        return torch.float16, "this GPU does not multiply bfloat16"
    return checkpoint, "the checkpoint's own"


def dtype_name(dtype: torch.dtype) -> str:
    """As settings and messages name it."""
    return str(dtype).removeprefix("torch.")
