"""Compares the samples of runs of lm-evaluation-harness in pairs, such as one against a server and one with
transformers.

Prints one JSON object: of every task that both runs have, how many answers are equal. An answer is a text, or the
verdict whether a continuation is the greedy one, with its log-likelihood. Ends with exit code 1 where an answer
differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def samples(folder: Path) -> dict[str, dict[int, list[Any]]]:
    """Responses by task and number of the document, of the latest run in the folder."""
    found: dict[str, dict[int, list[Any]]] = {}
    for file in sorted(folder.rglob("samples_*.jsonl"), key=lambda file: file.name.rpartition("_")[2]):
        task = file.stem.removeprefix("samples_").rpartition("_")[0]
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        found[task] = {row["doc_id"]: row["filtered_resps"] for row in rows}
    return found


def compare(served: dict[int, list[Any]], other: dict[int, list[Any]]) -> dict[str, float]:
    """Of one task: `answers` in all, those that are `equal`, and how far log-likelihoods differ. Raises ValueError
    where the runs have other documents."""
    if served.keys() != other.keys():
        raise ValueError(f"one run has {len(served)} documents, the other has {len(other)} or other ones")
    pairs = [pair for number in served for pair in zip(served[number], other[number], strict=True)]
    if all(isinstance(one, str) for one, _ in pairs):
        return {"answers": len(pairs), "equal": sum(one == two for one, two in pairs)}
    return {
        "answers": len(pairs),
        "equal": sum(str(one[1]) == str(two[1]) for one, two in pairs),
        "largest_difference": max(abs(float(one[0]) - float(two[0])) for one, two in pairs),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compatibility.evaluation", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="pairs of folders, each that of one run")
    folders: list[Path] = parser.parse_args(arguments).folders
    if len(folders) % 2:
        parser.error(f"{len(folders)} folders were given, must be pairs")
    tasks: dict[str, dict[str, float]] = {}
    for one, two in zip(folders[::2], folders[1::2], strict=True):
        served, other = samples(one), samples(two)
        for task in sorted(served.keys() & other.keys()):
            tasks[f"{one.name}: {task}"] = compare(served[task], other[task])
    print(json.dumps({"tasks": tasks}))
    return 0 if tasks and all(task["equal"] == task["answers"] for task in tasks.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
