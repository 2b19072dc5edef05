"""How long a pass took on its device, and what came after it. On a GPU both are known only once somebody waited."""

from __future__ import annotations

import time

import torch


class PassClock:
    """Starts where the pass does."""

    def __init__(self, device: torch.device) -> None:
        self._started = time.perf_counter()
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._computed = 0.0
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record()

    def computed(self) -> None:
        """All of the pass is computed, or on a GPU on its way."""
        self._computed = time.perf_counter()
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> tuple[float, float]:
        """Of the pass, and from its end until now. Waits for the pass where nobody did."""
        if self._events is None:
            return self._computed - self._started, time.perf_counter() - self._computed
        first, last = self._events
        last.synchronize()
        total = time.perf_counter() - self._started
        of_pass = min(total, first.elapsed_time(last) / 1000)
        return of_pass, total - of_pass
