"""Findings of `python -m bench.gpu` as tables in Markdown: one for each kind of finding, in the order of the file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_LEFT_OUT = ("block", "what", "at")


def tables(lines: list[dict[str, Any]]) -> str:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        kinds.setdefault(line["what"], []).append(line)
    return "\n".join(_table(what, found) for what, found in kinds.items())


def _table(what: str, found: list[dict[str, Any]]) -> str:
    columns = [name for name in dict.fromkeys(name for line in found for name in line) if name not in _LEFT_OUT]
    if not columns:
        return f"**{what}**\n"
    rows = [[_cell(line.get(column)) for column in columns] for line in found]
    header = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return "\n".join([f"**{what}**", "", *header, *(f"| {' | '.join(row)} |" for row in rows), ""])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_cell(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m bench.gpu.tables FINDINGS.jsonl", file=sys.stderr)
        return 2
    text = Path(arguments[0]).read_text(encoding="utf-8")
    print(tables([json.loads(line) for line in text.splitlines()]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
