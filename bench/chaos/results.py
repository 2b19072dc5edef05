"""Keeps what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.record import origin
from services.machine import describe_machine


def write_result(file: Path, command: str, result: Mapping[str, Any]) -> None:
    """In the form of all files in bench/results/."""
    content = origin(command, describe_machine()) | {"result": dict(result)}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
