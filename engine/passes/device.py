"""The device of a pass: how numbers reach it, which device kernels run on, and how long a pass takes there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch


def current(device: torch.device) -> AbstractContextManager[object]:
    """While it is open, events and kernels that name no device are for this one. Can be opened again."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def is_lost(device: torch.device) -> bool:
    """Whether the device computes nothing more for this process: after a failed assertion, an illegal address or an
    error of its memory every call fails, while running out of memory passes."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def on_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 `[numbers]`. To a GPU from pinned memory, so that the host does not wait for the copy."""
    return pinned(numbers, device).to(device, non_blocking=True)


def pinned(numbers: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """int64 `[numbers]` on the CPU, where `device` can fetch it by itself."""
    found = torch.from_numpy(np.asarray(numbers, np.int64))
    return found if device.type == "cpu" else host_buffer(found.shape, found.dtype, device).copy_(found)


def host_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of the CPU, not filled; pinned for a GPU, which then copies from and to it by itself."""
    # torch keeps pinned memory until what reads it has run. Pinning opens a context on the current GPU: on the first
    # one, unless the worker's own is current.
    with current(device):
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


class PassClock:
    """How long a pass takes on its device, and what comes after it. Starts with the pass.

    A GPU knows both only once somebody has waited for the pass.
    """

    def __init__(self, device: torch.device) -> None:
        self._started = time.perf_counter()
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._computed = 0.0
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record()

    def computed(self) -> None:
        """To be called once the pass is computed; on a GPU, once all of it is on its way."""
        self._computed = time.perf_counter()
        if self._events is not None:
            self._events[1].record()

    def wait(self) -> None:
        """Until the pass is computed."""
        if self._events is not None:
            self._events[1].synchronize()

    def seconds(self) -> tuple[float, float]:
        """Those of the pass, and those from its end until now. Waits for the end of the pass."""
        if self._events is None:
            return self._computed - self._started, time.perf_counter() - self._computed
        first, last = self._events
        last.synchronize()
        total = time.perf_counter() - self._started
        of_pass = min(total, first.elapsed_time(last) / 1000)
        return of_pass, total - of_pass
