"""The list of mutants that change nothing a test could notice, each with the reason: equivalent.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path

FILE = Path(__file__).with_name("equivalent.toml")


def read_equivalents(file: Path) -> dict[str, str]:
    """Reasons by the mutants' names. ValueError for an empty reason."""
    tables = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    reasons = {f"{module}:{name}": reason for module, entries in tables.items() for name, reason in entries.items()}
    empty = [name for name, reason in reasons.items() if not reason.strip()]
    if empty:
        raise ValueError(f"{file}: no reason for {empty}")
    return reasons


def unknown(reasons: Collection[str], made: Collection[str], modules: Collection[str]) -> list[str]:
    """Listed mutants of these modules that are not made (any more)."""
    return [name for name in reasons if name.partition(":")[0] in modules and name not in made]
