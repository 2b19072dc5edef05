"""The JSON file of a run, whole on disk after every step of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KIND = "gpu"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


class ResultFile:
    """What was found so far; whatever ends the run, the file holds what came before.

    `complete` says whether all was measured, `left_out` what was not and why.
    """

    def __init__(self, path: Path, origin: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Raises ValueError where the file cannot be written, or is there: results are not overwritten."""
        if path.exists():
            raise ValueError(f"{path} is there already; choose another --output")
        self._path = path
        self._content: dict[str, Any] = {
            "kind": KIND,
            **origin,
            "settings": dict(settings),
            "complete": False,
            "left_out": {},
            "targets": [],
            "cells": [],
            "logits": [],
        }
        self._write()

    def set(self, name: str, value: Any) -> None:
        self._content[name] = value
        self._write()

    def append(self, name: str, value: Any) -> None:
        self._content[name].append(value)
        self._write()

    def leave_out(self, what: str, reason: str) -> None:
        self._content["left_out"][what] = reason
        self._write()

    @property
    def whole(self) -> bool:
        return not self._content["left_out"]

    def _write(self) -> None:
        part = self._path.with_name(self._path.name + ".part")
        try:
            with part.open("w", encoding="utf-8") as file:
                json.dump(self._content, file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._path)
        except OSError as error:
            raise ValueError(f"cannot write {self._path}: {error.strerror}") from error
