"""Measures two versions of Spool against each other with `spool bench offline`, cell by cell in turns.

A process of each version keeps its workers loaded, and waits while the other one measures: so both find the machine in
the same state. FOLDER holds the turn, and is empty at the start. The version is the checkout in PYTHONPATH; this file
may be of a newer one.

    PYTHONPATH=OLD python bench/versions.py turns 0 FOLDER --policy auto --repeats 3 -o old.json &
    PYTHONPATH=NEW python bench/versions.py turns 1 FOLDER --policy auto --repeats 3 -o new.json
    python -m bench.versions compare old.json new.json --json bench/results/NAME.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

_LOOK_AGAIN_SECONDS = 0.05

Point = tuple[str, int, str]
"""System, batch size and draft of a cell."""


def take_turns(parity: int, folder: Path, arguments: Sequence[str]) -> int:
    """`spool bench offline` with these arguments; of all cells, one process measures those with even numbers."""
    import bench.offline.run as run
    from deploy.cli.main import main as spool

    measure, cell = run._Run._measure, parity
    turn = folder / "turn"

    async def in_turn(self: Any, *args: Any) -> Any:
        nonlocal cell
        while (int(turn.read_text()) if turn.exists() else 0) < cell:  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        try:
            return await measure(self, *args)
        finally:
            cell += 2
            passed = folder / f"passed by {parity}"
            passed.write_text(str(cell - 1))
            passed.rename(turn)

    run._Run._measure = in_turn  # type: ignore[method-assign]
    sys.argv = ["spool", "bench", "offline", *arguments]
    return spool() or 0


def compare(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """One entry for each cell that both files of a pair have: tokens a second of each repeat, and ratios of both."""
    return [cell for old, new in pairs for cell in _cells(old, new)]


def _cells(old: dict[str, Any], new: dict[str, Any]) -> Iterator[dict[str, Any]]:
    before, after = _speeds(old), _speeds(new)
    for point in before.keys() & after.keys():
        pairs = list(zip(before[point], after[point], strict=True))
        system, batch_size, draft = point
        yield {
            "cpu_isa": new["settings"].get("cpu_isa"),
            "target": new["settings"]["target"],
            "draft": draft,
            "system": system,
            "batch_size": batch_size,
            "old": before[point],
            "new": after[point],
            "ratio_of_medians": median(after[point]) / median(before[point]),
            "mean_ratio": geometric_mean([late / early for early, late in pairs]),
            "old_drafted": _drafted(old, point),
            "new_drafted": _drafted(new, point),
        }


def _speeds(content: dict[str, Any]) -> dict[Point, list[float]]:
    found: dict[Point, list[float]] = {}
    for one in content["measurements"]:
        found.setdefault(_point(one), []).append(round(one["tokens_per_second"], 1))
    return found


def _point(measurement: dict[str, Any]) -> Point:
    point = measurement["point"]
    return point["system"], point["batch_size"], point["draft"] or ""


def _drafted(content: dict[str, Any], point: Point) -> list[int]:
    """Tokens that drafts proposed, in each repeat."""
    return [one["statistics"].get("drafted", 0) for one in content["measurements"] if _point(one) == point]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    turns = parts.add_parser("turns")
    turns.add_argument("parity", type=int, choices=(0, 1), help="0 measures first")
    turns.add_argument("folder", type=Path)
    comparing = parts.add_parser("compare")
    comparing.add_argument("files", type=Path, nargs="+", help="the old version's and the new one's, in turns")
    comparing.add_argument("--json", type=Path, required=True)
    asked, arguments = parser.parse_known_args(argv)
    if asked.part == "turns":
        return take_turns(asked.parity, asked.folder, arguments)
    if arguments or len(asked.files) % 2:
        parser.error("files come in pairs: the old version's and the new one's")
    from bench.record import write_result

    contents = [json.loads(file.read_text(encoding="utf-8")) for file in asked.files]
    cells = compare(list(zip(contents[::2], contents[1::2], strict=True)))
    cells.sort(key=lambda cell: (cell["cpu_isa"], cell["target"], cell["draft"], cell["batch_size"]))
    commands = [command for content in contents for command in content["commands"]]
    write_result(
        asked.json, f"python -m bench.versions {' '.join(sys.argv[1:])}", {"commands": commands, "cells": cells}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
