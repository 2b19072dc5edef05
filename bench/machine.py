"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "grpcio", "ray")


def describe_machine() -> dict[str, object]:
    """Processor, cores this process may use, memory in GiB, GPUs if any, Python, the versions of what computes."""
    gpus = _gpus()
    return {
        "processor": _processor(),
        **({"gpus": gpus} if gpus else {}),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        **{package: found for package in _PACKAGES if (found := _version(package)) is not None},
    }


def _version(package: str) -> str | None:
    """None where it is not installed: benchmarks also run where there is no Ray."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    """Names and memory, as the driver has them."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    return found.stdout.splitlines() if found.returncode == 0 else []


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
