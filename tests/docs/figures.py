"""Reads the records, and looks for phrases made of their numbers in the documents."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from bench.record import RESULTS
from tests.docs.documents import ROOT

Cells = Mapping[tuple[str, int, str | None], Mapping[str, Any]]


def record(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = record(name)["result"]
    return found


def cells(name: str) -> Cells:
    """By system, batch size and draft model; a file has one cell of each."""
    points = [(cell["point"], cell) for cell in record(name)["cells"]]
    return {
        (point["system"], point["batch_size"], point["draft"] and point["draft"].partition("+")[0]): cell
        for point, cell in points
        if point["category"] is None
    }


def speed(cell: Mapping[str, Any]) -> str:
    return f"{cell['tokens_per_second']['median']:.1f}"


def gain(cell: Mapping[str, Any]) -> str:
    """Over plain decoding."""
    return f"{cell['ratio_to_plain']['median']:.2f}"


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def check(document: str, *phrases: str) -> None:
    text = words((ROOT / document).read_text(encoding="utf-8"))
    missing = [phrase for phrase in phrases if words(phrase) not in text]
    assert not missing, f"{document} does not say: {missing}"
