"""What a GPU would be asked for, counted on a CPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spool.engine.passes.graphed import Compute


class Work(TorchDispatchMode):
    """Counts what a GPU would be asked for: kernels, each operation that makes no view being one, and answers that its
    host waits for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is open for as long as the patch holds."""
        super().__init__()
        self.kernels = self.waits = 0
        self._apart = False
        executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
        monkeypatch.setattr(executor, "__call__", self._launching(executor.__call__))
        for name in ("tolist", "item", "cpu", "__bool__", "nonzero"):
            monkeypatch.setattr(torch.Tensor, name, self._waiting(getattr(torch.Tensor, name)))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is computed meanwhile is not counted: it is in a kernel, or in a graph."""
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    def _launching(self, launch: Callable[..., object]) -> Callable[..., object]:
        def counted(*given: object, **named: object) -> object:
            self.kernels += not self._apart
            with self.apart():
                return launch(*given, **named)

        return counted

    def _waiting(self, read: Callable[..., object]) -> Callable[..., object]:
        def counted(*given: object, **named: object) -> object:
            self.waits += not self._apart
            return read(*given, **named)

        return counted

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        is_view = any(value.alias_info and not value.alias_info.is_write for value in func._schema.returns)
        makes_room = "empty" in func.__name__
        self.kernels += not (self._apart or is_view or makes_room)
        return func(*args, **(kwargs or {}))


class Captures:
    """A stand-in for CUDA's graphs, which computes again what was captured, from the same tensors. Counts what is
    captured and repeated; `work` counts nothing of it."""

    def __init__(self) -> None:
        self.captured = 0
        self.replays = 0
        self.work: Work | None = None

    def __call__(self, compute: Compute) -> Callable[[], None]:
        compute()
        self.captured += 1

        def replay() -> None:
            self.replays += 1
            with nullcontext() if self.work is None else self.work.apart():
                compute()

        return replay
