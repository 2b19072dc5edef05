"""Weights before Ray starts, in an init container: its log says that they come, and it ends where they do not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy.errors import RunError

_BLOCK = 512
_GIGABYTE = 1_000_000_000


class Watch:
    """Says how much is in folders, and notices when nothing more comes."""

    def __init__(
        self, folders: Sequence[Path], stall_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folders = folders
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._bytes = self._measured()
        self._changed = self._looked = clock()

    def look(self) -> str:
        """One line on what has come. Raises RunError when that has not changed for too long."""
        now, found = self._clock(), self._measured()
        speed = max(0, found - self._bytes) / max(now - self._looked, 1e-9)
        if found != self._bytes:
            self._changed = now
        self._bytes, self._looked = found, now
        idle = now - self._changed
        if idle >= self._stall_seconds:
            raise RunError(f"stuck: {found / _GIGABYTE:.2f} GB are there, and nothing has come for {idle:.0f} s")
        return f"{found / _GIGABYTE:.2f} GB are there, {speed / 1e6:.1f} MB/s"

    def _measured(self) -> int:
        """Bytes on the disk, so that files made in full length before they are filled do not count as there."""
        total = 0
        for folder in self._folders:
            for place, _, names in os.walk(folder):
                for name in names:
                    try:
                        total += os.lstat(os.path.join(place, name)).st_blocks * _BLOCK
                    except FileNotFoundError:
                        continue
        return total


def fetch_watched(
    names: Sequence[str],
    fetch: Callable[[str], object],
    watch: Watch,
    tell: Callable[[str], None],
    look_seconds: float = 10.0,
) -> None:
    """Fetches models one after the other, telling every `look_seconds` what has come.

    Raises what `fetch` raises, and RunError when `watch` finds it stuck; the fetch then goes on in a thread that ends
    with the process.
    """
    for name in names:
        failures: list[BaseException] = []
        done = threading.Event()
        threading.Thread(target=_run, args=(fetch, name, failures, done), daemon=True).start()
        while not done.wait(look_seconds):
            tell(f"fetching {name}: {watch.look()}")
        if failures:
            raise failures[0]
        tell(f"{name} is ready")


def _run(fetch: Callable[[str], object], name: str, failures: list[BaseException], done: threading.Event) -> None:
    try:
        fetch(name)
    except BaseException as failure:
        failures.append(failure)
    finally:
        done.set()
