"""`spool logs`: what the processes of a served application have written."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path

from deploy.cli.status import find_served, is_there
from deploy.cluster.log_files import LogFile, log_files
from deploy.cluster.served_state import Served, StateFolder
from deploy.errors import RunError

_POLL_SECONDS = 0.3


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
