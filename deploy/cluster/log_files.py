"""The log files of a served application on this machine, and what is new in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_ACTOR = b":actor_name:ServeReplica:"
# Ray begins its files with lines such as ":job_id:01000000".
_MARKS = (b":job_id:", b":actor_name:", b":task_name:")
_HEAD_BYTES = 4096


@dataclass(slots=True)
class LogFile:
    """What one process writes to its standard error. `name` is the process's."""

    name: str
    path: Path
    _offset: int = 0
    _cut: bytes = field(default=b"", repr=False)

    def new_lines(self) -> list[str]:
        """Lines that were ended since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        self._offset += len(content)
        *whole, self._cut = (self._cut + content).split(b"\n")
        return [line.decode(errors="replace") for line in whole if not line.startswith(_MARKS)]


def log_files(folder: Path, app_name: str, ray: bool) -> list[LogFile]:
    """Of every process of the application that has a log in `folder`: Ray's, or that of processes without Ray."""
    found = _of_ray(folder, app_name) if ray else (LogFile(path.stem, path) for path in folder.glob("*.log"))
    return sorted(found, key=lambda file: file.name)


def _of_ray(folder: Path, app_name: str) -> Iterator[LogFile]:
    """Ray names the files after workers; inside stands which actor wrote them, such as `ServeReplica:spool:Gateway`."""
    for path in folder.glob("worker-*.err"):
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        for line in head.splitlines():
            app, colon, deployment = line.removeprefix(_ACTOR).decode(errors="replace").rpartition(":")
            if line.startswith(_ACTOR) and colon and app == app_name:
                yield LogFile(f"{deployment}-{path.stem.rpartition('-')[2]}", path)
                break
