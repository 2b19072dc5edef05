"""Findings, written to disk line by line, and blocks of measurements with a time limit each."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any


class OutOfTimeError(KeyboardInterrupt):
    """The time limit of the block is over. Not an `Exception`, so that code that handles failures lets it through, and
    one that event loops let through, too."""


class Findings:
    """One JSON object a line, each on the disk before the next measurement begins."""

    def __init__(self, path: Path, show: Callable[[str], None]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._show = show
        self._started = time.monotonic()
        self.block = ""

    def add(self, what: str, **values: Any) -> None:
        """`values` become JSON as they are; floats are cut to six significant digits."""
        found = {"block": self.block, "what": what} | {name: _rounded(value) for name, value in values.items()}
        found["at"] = round(time.monotonic() - self._started, 2)
        self._file.write(json.dumps(found, default=str) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        shown = ", ".join(f"{name} {_shown(value)}" for name, value in found.items() if name not in ("block", "what"))
        self._show(f"{self.block} | {what}: {shown}")


@dataclass(frozen=True, slots=True)
class Block:
    """`seconds`: the time limit of the block. Whatever `run` raises becomes a finding."""

    name: str
    seconds: float
    run: Callable[[], None]


def run_block(block: Block, findings: Findings, seconds_left: float) -> bool:
    """Whether the block came to its end. It is stopped after its own seconds, or after `seconds_left`."""
    findings.block = block.name
    started = time.monotonic()
    try:
        with _deadline(min(block.seconds, seconds_left)):
            block.run()
    except OutOfTimeError:
        findings.add("out of time", seconds=time.monotonic() - started)
        return False
    except Exception as error:  # noqa: BLE001
        place = traceback.extract_tb(error.__traceback__)[-4:]
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(place))
        findings.add("failed", error=f"{type(error).__name__}: {error}"[:1500], where=where)
        return False
    findings.add("done", seconds=time.monotonic() - started)
    return True


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raises OutOfTimeError in the main thread once they are over, as soon as Python code runs again."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value


def _shown(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 300 else f"{text[:300]}..."
