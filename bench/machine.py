"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "grpcio", "ray")


def describe_machine() -> dict[str, object]:
    """Processor, cores this process may use, memory in GiB, Python and the versions of what computes."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    values = {key.strip(): value.strip() for key, value in fields.items()}
    return " ".join(
        [values.get("model name", platform.machine())]
        + [f"{name} {values[name]}" for name in ("cpu family", "model", "stepping") if name in values]
    )
