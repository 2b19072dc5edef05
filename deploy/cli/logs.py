"""`spool logs`: what the processes of a served application have written."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from deploy.cli.status import find_served, is_there
from deploy.cluster.served_state import Served, StateFolder
from deploy.errors import RunError

_POLL_SECONDS = 0.3

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


def logs(app_name: str, process: str | None, tail: int | None, follow: bool) -> int:
    """Prints logs, each line with the name of its process where there are several.

    `process` is the beginning of a name. With `follow`, goes on until Ctrl-C or until the application has ended. Raises
    RunError where nothing is served, or no process has the name.
    """
    state = StateFolder()
    served = find_served(app_name, state)
    files = {file.path: file for file in _files(served, process)}
    if not files:
        names = ", ".join(file.name for file in _files(served, None)) or "none"
        raise RunError(f"no process of {app_name} with a log here is called {process}, there are: {names}")
    several = len(files) > 1
    for file in files.values():
        _print(file, deque(file.new_lines(), tail), several)
    if not follow:
        return 0
    pause = threading.Event()
    try:
        while is_there(served, state):
            pause.wait(_POLL_SECONDS)
            # Processes that started since have files of their own.
            for file in _files(served, process):
                files.setdefault(file.path, file)
            for file in files.values():
                if file.path.exists():
                    _print(file, file.new_lines(), several or len(files) > 1)
    except KeyboardInterrupt:
        return 0
    return 0


def _files(served: Served, process: str | None) -> list[LogFile]:
    if served.log_folder is None:
        raise RunError(f"{served.app_name} was started by another version, which kept no folder of logs")
    found = log_files(Path(served.log_folder), served.app_name, ray=served.ray_address is not None)
    return [file for file in found if file.name.lower().startswith((process or "").lower())]


def _print(file: LogFile, lines: deque[str] | list[str], named: bool) -> None:
    for line in lines:
        print(f"{file.name}: {line}" if named else line, flush=True)
