"""Which dtype a model is computed in where the settings leave the choice open."""

from __future__ import annotations

import torch
from torch import nn

AUTO = "auto"

EMBEDDING_SCALE = "scalar_embed_scale"
"""Of embeddings of transformers that multiply their rows: the factor before its buffer is rounded to a dtype."""

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


def converted(model: nn.Module, dtype: torch.dtype) -> None:
    """In place. Factors of embeddings are rounded to `dtype` from what they are, not from what they were rounded to."""
    model.to(dtype)
    for module in model.modules():
        if (scale := getattr(module, EMBEDDING_SCALE, None)) is not None:
            module.embed_scale.fill_(scale)


def dtype_name(dtype: torch.dtype) -> str:
    """As settings and messages name it."""
    return str(dtype).removeprefix("torch.")
