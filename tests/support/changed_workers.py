"""Environments of worker processes that compute slowly, die of a poisoned prompt, or have other processors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_HOOK = Path(__file__).with_name("worker_hook")
POISON = (18, 11, 17, 12, 16, 13, 15, 14)
"""Token ids that no other prompt has in this order."""


def slow_steps(seconds: float) -> dict[str, str]:
    return _path() | {"SPOOL_STEP_SECONDS": str(seconds)}


def paced_by(file: Path) -> dict[str, str]:
    """Each step takes at least as many seconds as the file says; a test may replace it at any time."""
    return _path() | {"SPOOL_STEP_SECONDS_FILE": str(file)}


def dying_of_poison() -> dict[str, str]:
    return _path() | {"SPOOL_POISON": ",".join(map(str, POISON))}


def unlike(isas: Mapping[str, str]) -> dict[str, str]:
    """The instruction sets of workers, by their names."""
    return _path() | {"SPOOL_ISAS": " ".join(f"{name}={isa}" for name, isa in isas.items())}


def _path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(_HOOK), os.environ.get("PYTHONPATH"))))}
