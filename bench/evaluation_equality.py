"""Compares the samples of two runs of lm-evaluation-harness, such as one against a server and one with transformers.

python -m bench.evaluation_equality SERVED OTHER [SERVED OTHER ...]     folders that `lm_eval --log_samples` wrote

Prints one JSON object: of every task that both runs have, how many answers are equal letter for letter, or how far
log-likelihoods differ and how many verdicts "is the greedy continuation" are equal. Ends with exit code 1 where an
answer or a verdict differs.
"""

from __future__ import annotations

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


def compare(served: dict[int, list[Any]], other: dict[int, list[Any]]) -> dict[str, Any]:
    """Of one task. Raises ValueError where the runs have other documents."""
    if served.keys() != other.keys():
        raise ValueError(f"one run has {len(served)} documents, the other has {len(other)} or other ones")
    pairs = [pair for number in served for pair in zip(served[number], other[number], strict=True)]
    if all(isinstance(one, str) for one, _ in pairs):
        return {"answers": len(pairs), "equal": sum(one == two for one, two in pairs)}
    differences = [abs(float(one[0]) - float(two[0])) for one, two in pairs]
    return {
        "log_likelihoods": len(pairs),
        "largest_difference": max(differences),
        "equal_verdicts": sum(str(one[1]) == str(two[1]) for one, two in pairs),
    }


def main(arguments: Sequence[str]) -> int:
    if not arguments or len(arguments) % 2:
        print(__doc__, file=sys.stderr)
        return 2
    tasks: dict[str, Any] = {}
    for one, two in zip(arguments[::2], arguments[1::2], strict=True):
        served, other = samples(Path(one)), samples(Path(two))
        for task in sorted(served.keys() & other.keys()):
            tasks[f"{Path(one).name}: {task}"] = compare(served[task], other[task])
    same = [
        each.get("equal", each.get("equal_verdicts")) == each.get("answers", each.get("log_likelihoods"))
        for each in tasks.values()
    ]
    print(json.dumps({"tasks": tasks}))
    return 0 if tasks and all(same) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
