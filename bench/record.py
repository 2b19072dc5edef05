"""Runs a command that prints JSON last, and keeps it with machine and command under bench/results/.

python -m bench.record exactness_greedy -- spool verify --prompts FILE --json
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from services.machine import describe_machine

RESULTS = Path(__file__).parent / "results"


def origin(command: str, machine: Mapping[str, object]) -> dict[str, object]:
    """What no result goes without: the command that made it, when, and the machine it ran on."""
    return {"command": command, "date": datetime.now(UTC).date().isoformat(), "machine": dict(machine)}


def keep(name: str, command: Sequence[str], printed: str) -> Path:
    """Writes the JSON object on the last line of `printed`. Raises ValueError where there is none."""
    lines = printed.strip().splitlines()
    if not lines:
        raise ValueError(f"{' '.join(command)} printed nothing")
    result = origin(" ".join(command), describe_machine()) | {"result": json.loads(lines[-1])}
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.json"
    file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
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
