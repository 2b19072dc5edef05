"""The JSON file of a benchmark: every measurement is on disk before the next begins, and a rerun goes on."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.offline.grid import GridPoint
from bench.offline.options import without_place
from bench.offline.summary import Measurement, summarise
from deploy.errors import UsageError

_KIND = "offline"


class BenchFile:
    """What was measured so far with some settings on some machine.

    `settings` are those that make measurements comparable: a file with others is refused.
    """

    def __init__(self, path: Path, settings: dict[str, Any], machine: dict[str, Any], command: str) -> None:
        """Raises `UsageError` where the file is no such one, or holds what cannot stand beside new measurements."""
        self._path = path
        self._settings = settings
        self._machine = machine
        self._commands = [command]
        self._left_out: dict[str, str] = {}
        self.references: dict[GridPoint, list[str]] = {}
        self.measurements: list[Measurement] = []
        self._load()

    def find(self, point: GridPoint, repeat: int) -> Measurement | None:
        return next((one for one in self.measurements if (one.point, one.repeat) == (point, repeat)), None)

    def add(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        self._left_out.pop(measurement.point.system.value, None)
        self._write()

    def set_reference(self, point: GridPoint, digests: list[str]) -> None:
        self.references[point] = digests
        self._write()

    def leave_out(self, system: str, reason: str) -> None:
        """Says in the file why a system was not measured."""
        self._left_out[system] = reason
        self._write()

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": _KIND,
            "commands": self._commands,
            "date": today(),
            "machine": self._machine,
            "settings": self._settings,
            "commits": sorted({found.commit for found in self.measurements}),
            "left_out": self._left_out,
            "cells": [summary.to_json() for summary in summarise(self.measurements)],
            "references": [
                {"point": point.to_json(), "digests": digests} for point, digests in self.references.items()
            ],
            "measurements": [measurement.to_json() for measurement in self.measurements],
        }

    def _load(self) -> None:
        content = comparable_content(self._path, _KIND, self._settings, self._machine)
        if "measurements" not in content:
            return
        try:
            self.references = {GridPoint.from_json(one["point"]): one["digests"] for one in content["references"]}
            self.measurements = [Measurement.from_json(one) for one in content["measurements"]]
            commands, self._left_out = content["commands"], dict(content["left_out"])
        except (KeyError, ValueError, TypeError) as error:
            raise UsageError(f"{self._path} is not as this version writes it; choose another --output") from error
        self._commands = list(dict.fromkeys([*commands, *self._commands]))

    def _write(self) -> None:
        write_whole(self._path, self.to_json())


def comparable_content(path: Path, kind: str, settings: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """What a file of results holds, or the beginning of a new one.

    Raises `UsageError` where the file is of another kind, or was measured with other settings or on another machine.
    """
    # As it comes back from a file, so that the two compare.
    fresh: dict[str, Any] = json.loads(json.dumps({"kind": kind, "machine": machine, "settings": settings}))
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = {name: content[name] for name in fresh}
    except FileNotFoundError:
        return fresh
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no result of `spool bench {kind}`; choose another --output") from error
    if found["kind"] != kind:
        raise UsageError(f"{path} holds a {found['kind']} benchmark; choose another --output")
    for name in ("settings", "machine"):
        for key in sorted(found[name].keys() | fresh[name].keys()):
            there, here = found[name].get(key), fresh[name].get(key)
            if there != here:
                raise UsageError(
                    f"{path} was measured with {name} {key} = {there!r}, not {here!r}; choose another --output"
                )
    return content


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Puts a JSON file in the place of what was there, whole or not at all. Raises `UsageError`."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def shown_command(arguments: Sequence[str]) -> str:
    """The command line that results carry, absolute paths shortened to their names."""
    return shlex.join(["spool", *map(without_place, arguments)])


def today() -> str:
    """In UTC, as results carry it."""
    return datetime.now(UTC).date().isoformat()


def output_digest(tokens: Sequence[int]) -> str:
    """Equal for equal output."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:12]
