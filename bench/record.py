"""Runs a command whose last line of output is JSON, and keeps that with command, commit, date and machine under
bench/results/.

    python -m bench.record exact_greedy -- spool verify --prompts FILE --json
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "transformers", "grpcio", "ray")


def origin(command: str) -> dict[str, object]:
    """The fields that every result has: the command that made it, Spool's commit, the date, and the machine."""
    return {
        "command": command,
        "commit": commit_of(RESULTS.parent),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
    }


def write_result(file: Path, command: str, result: Mapping[str, Any]) -> None:
    """Writes a result in the form of the files in bench/results/."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(origin(command) | {"result": dict(result)}, indent=2) + "\n", encoding="utf-8")


def commit_of(folder: Path) -> str:
    """Of the folder's repository, with " changed" where files differ from it; empty without repository or git."""
    return _printed("git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty= changed")


def describe_machine() -> dict[str, object]:
    """Processor, cores this process may use, memory in GiB, GPUs if any, versions of Python and of what computes."""
    gpus = _printed("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader").splitlines()
    return {
        "processor": _processor(),
        **({"gpus": gpus} if gpus else {}),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        **{package: found for package in _PACKAGES if (found := installed_version(package))},
    }


def installed_version(package: str) -> str:
    """Empty where it is not installed: benchmarks also run where there is no Ray."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    names = ("cpu family", "model", "stepping")
    return " ".join([values.get("model name", ""), *(f"{name} {values[name]}" for name in names if name in values)])


def _printed(program: str, *arguments: str) -> str:
    """Empty where the program fails, or is not installed."""
    if shutil.which(program) is None:
        return ""
    finished = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    return finished.stdout.strip() if finished.returncode == 0 else ""


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 3 or arguments[1] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    name, _, *command = arguments
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        result = json.loads(finished.stdout.strip().rpartition("\n")[2])
    except ValueError:
        print(f"{' '.join(command)} printed no JSON on its last line", file=sys.stderr)
        return 1
    write_result(RESULTS / f"{name}.json", " ".join(command), result)
    return finished.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
