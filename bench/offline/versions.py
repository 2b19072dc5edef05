"""Measures two versions of Spool against each other with `spool bench offline`, cell by cell in turns.

    python -m bench.offline.versions ../old . --json bench/results/versions_NAME.json -- --policy auto --repeats 3

A process for each version, from the folder of its checkout, keeps its workers loaded and waits while the other one
measures: so both find the machine in the same state. What follows `--` goes to `spool bench offline`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

_LOOK_AGAIN_SECONDS = 0.05

Point = tuple[str, int, str]
"""System, batch size and draft of a cell."""


async def measure(versions: Sequence[Path], folder: Path, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """What each version's `spool bench offline` writes. Raises RuntimeError where one of them fails."""
    files = [folder / f"{parity}.json" for parity in range(len(versions))]
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "in turns", str(parity), str(folder), *arguments, "-o", str(file)),
            env=os.environ | {"PYTHONPATH": str(version.resolve())},
        )
        for parity, (version, file) in enumerate(zip(versions, files, strict=True))
    ]
    waiting = [asyncio.create_task(process.wait()) for process in processes]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if any(task.done() and task.result() for task in waiting):
        for process in processes:
            if process.returncode is None:
                process.terminate()
    for version, ended in zip(versions, await asyncio.gather(*waiting), strict=True):
        if ended:
            raise RuntimeError(f"spool bench offline of {version} ended with {ended}")
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def take_turns(parity: int, folder: Path, arguments: Sequence[str]) -> int:
    """`spool bench offline` of the version in PYTHONPATH. Of all cells, the process of parity 0 measures those with
    even numbers."""
    import bench.offline.run as run
    from deploy.cli.main import main as spool

    measure_cell, cell = run._Run._measure, parity
    turn = folder / "turn"

    async def in_turn(self: Any, *args: Any) -> Any:
        nonlocal cell
        while (int(turn.read_text()) if turn.exists() else 0) < cell:  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        try:
            return await measure_cell(self, *args)
        finally:
            cell += 2
            passed = folder / f"passed by {parity}"
            passed.write_text(str(cell - 1))
            passed.rename(turn)

    run._Run._measure = in_turn  # type: ignore[method-assign,assignment]
    sys.argv = ["spool", "bench", "offline", *arguments]
    spool()
    return 0


def compare(old: dict[str, Any], new: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One entry for each cell that both have: tokens a second of each repeat, and their ratios."""
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


def _drafted(content: dict[str, Any], point: Point) -> list[int]:
    """Tokens that drafts proposed, in each repeat."""
    return [one["statistics"].get("drafted", 0) for one in content["measurements"] if _point(one) == point]


def _point(measurement: dict[str, Any]) -> Point:
    point = measurement["point"]
    return point["system"], point["batch_size"], point["draft"] or ""


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["in turns"]:
        return take_turns(int(argv[1]), Path(argv[2]), argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the checkout of one version")
    parser.add_argument("new", type=Path, help="and that of the other")
    parser.add_argument("--json", type=Path, required=True, help="other cells that it holds are kept")
    end = argv.index("--") if "--" in argv else len(argv)
    asked, arguments = parser.parse_args(argv[:end]), argv[end + 1 :]
    from bench.record import commit_of, write_result

    with tempfile.TemporaryDirectory(prefix="spool-versions-") as name:
        old, new = asyncio.run(measure((asked.old, asked.new), Path(name), arguments))
    cells = list(compare(old, new))
    kept = json.loads(asked.json.read_text(encoding="utf-8"))["result"] if asked.json.exists() else {}
    commands = dict.fromkeys([*kept.get("commands", []), *old["commands"], *new["commands"]])
    result = {
        "old": commit_of(asked.old),
        "new": commit_of(asked.new),
        "commands": list(commands),
        "cells": merged(kept.get("cells", []), cells),
    }
    write_result(asked.json, f"python -m bench.offline.versions {' '.join(argv)}", result)
    return 0


def merged(kept: Sequence[dict[str, Any]], cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells, in order, with those of the ones kept that were not measured again."""

    def key(cell: dict[str, Any]) -> tuple[str, str, str, int]:
        return str(cell["cpu_isa"]), cell["target"], cell["draft"], cell["batch_size"]

    found = {key(cell): cell for cell in (*kept, *cells)}
    return [found[place] for place in sorted(found)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
