"""What goes from Python to a device: numbers to compute with, and kernels that name no device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


def current(device: torch.device) -> AbstractContextManager[object]:
    """While it is open, events and kernels that name no device are for this one. Can be opened again."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 `[numbers]`. To a GPU from pinned memory, so that nobody waits for the copy."""
    return pinned(numbers, device).to(device, non_blocking=True)


def pinned(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 `[numbers]` on the CPU, where `device` can fetch it by itself."""
    # torch keeps pinned memory until what reads it has run.
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
