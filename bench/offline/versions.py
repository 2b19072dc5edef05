"""Measures two versions of Spool with `spool bench offline`, one after the other, several times, and compares them.

    python -m bench.offline.versions OLD NEW --pairs 5 --output FILE.json -- --policy plain --batch-size 8

OLD and NEW are folders with a checkout each. What follows `--` goes to `spool bench offline`, paths must be absolute.
Every other pair begins with NEW. `ratio` is the geometric mean of NEW over OLD in tokens per second, over the pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench.record import commit_of, write_result

Speeds = dict[str, float]
"""Tokens per second of each cell."""


def measure(version: Path, arguments: Sequence[str]) -> Speeds:
    """Raises `subprocess.CalledProcessError`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "deploy.cli.main", "bench", "offline", "--repeats", "1", *arguments]
        environment = os.environ | {"PYTHONPATH": str(version.resolve())}
        subprocess.run([*command, "--output", str(file)], cwd=version, env=environment, check=True)
        measurements = json.loads(file.read_text(encoding="utf-8"))["measurements"]
    return {_cell(one["point"]): one["tokens_per_second"] for one in measurements}


def _cell(point: dict[str, Any]) -> str:
    draft = f", {point['draft']} x {point['draft_length']}" if point["draft"] else ""
    return f"{point['system']}, batch {point['batch_size']}{draft}"


def compare(old: Sequence[Speeds], new: Sequence[Speeds]) -> list[dict[str, Any]]:
    """One entry for each cell that both versions measured."""
    cells = [cell for cell in old[0] if cell in new[0]]
    return [
        {
            "cell": cell,
            "old": [speeds[cell] for speeds in old],
            "new": [speeds[cell] for speeds in new],
            "ratio": geometric_mean([after[cell] / before[cell] for before, after in zip(old, new, strict=True)]),
        }
        for cell in cells
    ]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    end = argv.index("--") if "--" in argv else len(argv)
    asked, arguments = parser.parse_args(argv[:end]), argv[end + 1 :]
    found: dict[Path, list[Speeds]] = {asked.old: [], asked.new: []}
    for pair in range(asked.pairs):
        for version in (asked.new, asked.old) if pair % 2 else (asked.old, asked.new):
            found[version].append(measure(version, arguments))
    cells = compare(found[asked.old], found[asked.new])
    result = {"old": commit_of(asked.old), "new": commit_of(asked.new), "cells": cells}
    write_result(asked.output, shlex.join(["python", "-m", "bench.offline.versions", *argv]), result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
