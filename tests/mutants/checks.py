"""What can kill a mutant: the collected tests, with what each costs and which lines it runs, measured once and kept."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.mutants.forks import Say, in_fork, limit_processor_time
from tests.mutants.operators import Mutant
from tests.mutants.sources import Module, digest

STAGES = {"unit tests": 6.0, "integration tests": 4.0, "core simulation": 4.0, "fault schedules": 6.0}
"""In their order, and the seconds after which no more of a stage's checks run for one mutant."""

_MOST_SECONDS = 5.0
"""A test that takes longer is no check."""
_MOST_SECONDS_TRACED = 120.0

Run = Callable[[pytest.Item], bool]
"""Runs a test in this process; whether it has passed."""


@dataclass(frozen=True, slots=True)
class Check:
    """One test. `lines`: which it runs of each module, by the module's path."""

    item: pytest.Item
    seconds: float
    lines: dict[str, frozenset[int]]

    @property
    def name(self) -> str:
        return self.item.nodeid

    @property
    def stage(self) -> str:
        return stage_of(self.item.nodeid)

    @property
    def digest(self) -> str:
        """Changes with the file of the test."""
        return _file_digest(self.item.path)

    def runs(self, module: Module, lines: Iterable[int]) -> bool:
        return not self.lines.get(module.path, frozenset()).isdisjoint(lines)


def stage_of(name: str) -> str:
    file = name.partition("::")[0]
    if file.startswith("tests/integration/"):
        return "integration tests"
    if file.endswith("mutants/simulations.py"):
        return "fault schedules" if "under_faults" in name else "core simulation"
    return "core simulation" if file.startswith("tests/sim/") else "unit tests"


def checks_for(mutant: Mutant, module: Module, checks: Sequence[Check]) -> list[Check]:
    """Those that run the mutant, cheap ones first, as many of each stage as its seconds allow.

    What is executed at import is anybody's: then those that run some line of the module, or all if none does.
    """
    if mutant.function is not None:
        reaching = [check for check in checks if check.runs(module, mutant.lines)]
    else:
        reaching = [check for check in checks if module.path in check.lines] or list(checks)
    order = list(STAGES)
    left = dict(STAGES)
    chosen = []
    for check in sorted(reaching, key=lambda check: (order.index(check.stage), check.seconds)):
        if left[check.stage] > 0:
            left[check.stage] -= check.seconds
            chosen.append(check)
    return chosen


class Measurements:
    """Keeps in a file what was measured of each test, until the test's file changes, or a module that it runs."""

    def __init__(self, file: Path, modules: Sequence[Module], run: Run) -> None:
        self._file = file
        self._modules = {module.path: module for module in modules}
        self._run = run
        self._kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def check(self, item: pytest.Item) -> Check | None:
        """None for one that fails as it is, or takes too long."""
        kept = self._kept.get(item.nodeid)
        if kept is None or not self._is_valid(kept, item):
            kept = self._kept[item.nodeid] = self._measure(item)
        if kept["seconds"] is None:
            return None
        lines = {path: frozenset(found["lines"]) for path, found in kept["modules"].items()}
        return Check(item, kept["seconds"], lines)

    def save(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._kept), encoding="utf-8")

    def _is_valid(self, kept: dict[str, Any], item: pytest.Item) -> bool:
        modules = {path: found["digest"] for path, found in kept["modules"].items()}
        now = {path: module.digest for path, module in self._modules.items()}
        return kept["file"] == _file_digest(item.path) and modules == {path: now.get(path) for path in modules}

    def _measure(self, item: pytest.Item) -> dict[str, Any]:
        def timed(say: Say) -> None:
            limit_processor_time(_MOST_SECONDS)
            began = time.monotonic()
            if self._run(item):
                say(repr(time.monotonic() - began))

        def traced(say: Say) -> None:
            limit_processor_time(_MOST_SECONDS_TRACED)
            tracer = _Tracer({str(module.file) for module in self._modules.values()})
            threading.settrace(tracer)
            sys.settrace(tracer)
            passed = self._run(item)
            sys.settrace(None)
            if passed:
                say(json.dumps({file: sorted(lines) for file, lines in tracer.lines.items() if lines}))

        seconds = in_fork(timed).said
        found = in_fork(traced).said if seconds else []
        lines = json.loads(found[0]) if found else {}
        by_path = {path: lines[str(module.file)] for path, module in self._modules.items() if str(module.file) in lines}
        return {
            "file": _file_digest(item.path),
            "seconds": round(float(seconds[0]), 4) if found else None,
            "modules": {path: {"digest": self._modules[path].digest, "lines": run} for path, run in by_path.items()},
        }


class _Tracer:
    """Which lines of some files run; a trace function for sys.settrace."""

    def __init__(self, files: set[str]) -> None:
        self.lines: dict[str, set[int]] = {file: set() for file in files}
        self._local = {file: self._of_file(lines) for file, lines in self.lines.items()}

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._local.get(frame.f_code.co_filename)

    @staticmethod
    def _of_file(lines: set[int]) -> Any:
        def trace(frame: FrameType, event: str, argument: object) -> Any:
            lines.add(frame.f_lineno)
            return trace

        return trace


@cache
def _file_digest(file: Path) -> str:
    return digest(file.read_text(encoding="utf-8"))
