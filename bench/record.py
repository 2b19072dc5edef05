"""Runs a command that prints JSON on its last line, and keeps that with command, commit, date and machine under
bench/results/.

python -m bench.record exactness_greedy -- spool verify --prompts FILE --json
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.machine import describe_machine

RESULTS = Path(__file__).parent / "results"


def commit_of(folder: Path) -> str:
    """Of the repository that has the folder, with "changed" where files are not those of the commit; empty outside a
    repository, and without git."""
    return ask_git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty= changed")


def ask_git(folder: Path, *arguments: str) -> str:
    """What git prints; empty where it fails, or is not there."""
    try:
        finished = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return finished.stdout.strip()


def origin(command: str, machine: Mapping[str, object]) -> dict[str, object]:
    """The fields that every result has: the command that made it, Spool's commit, the date, and the machine."""
    return {
        "command": command,
        "commit": commit_of(RESULTS.parent),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": dict(machine),
    }


def write_result(file: Path, command: str, result: Mapping[str, Any]) -> None:
    """Writes a result in the form of the files in bench/results/."""
    content = origin(command, describe_machine()) | {"result": dict(result)}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def keep(name: str, command: Sequence[str], printed: str) -> Path:
    """Writes the JSON object on the last line of `printed`. Raises ValueError where there is none."""
    lines = printed.strip().splitlines()
    if not lines:
        raise ValueError(f"{' '.join(command)} printed nothing")
    file = RESULTS / f"{name}.json"
    write_result(file, " ".join(command), json.loads(lines[-1]))
    return file


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 3 or arguments[1] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    name, _, *command = arguments
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        print(keep(name, command, finished.stdout))
    except ValueError as error:
        print(f"nothing to keep: {error}", file=sys.stderr)
        return 1
    return finished.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
