"""Waiting for what other tasks, threads and processes do; limits are beyond what a busy machine takes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONG = 120.0
"""Seconds after which something has gone wrong."""


async def until(condition: Callable[[], bool], seconds: float = LONG) -> None:
    """For what no event announces."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def wait_until(holds: Callable[[], bool], what: str, seconds: float = LONG, pause: float = 0.1) -> None:
    """The same where there is no event loop; `what` is said when it does not happen. A longer `pause` is for conditions
    that cost a processor's time to look at."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(pause)


@contextmanager
def setting(event: threading.Event) -> Iterator[None]:
    """Sets the event at the end, however that comes."""
    try:
        yield
    finally:
        event.set()
