"""How Triton kernels are launched: as they are needed, or ahead of it, where they are only made, several at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton

_only_made: ContextVar[bool] = ContextVar("only_made", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    if _only_made.get():
        kernel.warmup(*arguments, grid=grid, **options)
    else:
        kernel[grid](*arguments, **options)


@contextmanager
def made_ahead() -> Iterator[None]:
    """What is launched meanwhile does not run and is made, on all processors, by the end. A kernel that cannot be made
    raises the compiler's error where it is launched next."""
    made = _only_made.set(True)
    try:
        with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
            yield
    finally:
        _only_made.reset(made)
