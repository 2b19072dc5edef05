"""`spool logs`: what the processes of a served application have written, printed by `tail`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from spool.deploy.cli.status import find_served
from spool.deploy.cluster.served_state import StateFolder
from spool.deploy.errors import RunError
from spool.deploy.progress import say

_ACTOR = b":actor_name:ServeReplica:"
_HEAD_BYTES = 4096


def log_files(folder: Path, app_name: str, ray: bool) -> dict[str, Path]:
    """By name, of every process of the application that has a log in `folder`: Ray's, or that of processes without
    Ray."""
    return dict(sorted(_of_ray(folder, app_name) if ray else ((path.stem, path) for path in folder.glob("*.log"))))


def _of_ray(folder: Path, app_name: str) -> Iterator[tuple[str, Path]]:
    """Ray names the files after workers; inside stands which actor wrote them, such as `ServeReplica:spool:Gateway`."""
    for path in folder.glob("worker-*.err"):
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        for line in head.splitlines():
            app, colon, deployment = line.removeprefix(_ACTOR).decode(errors="replace").rpartition(":")
            if line.startswith(_ACTOR) and colon and app == app_name:
                yield f"{deployment}-{path.stem.rpartition('-')[2]}", path
                break


def logs(app_name: str, process: str | None, tail: int | None, follow: bool) -> int:
    """Prints the logs of the processes whose names begin with `process`; says first which file is whose.

    With `follow`, goes on until Ctrl-C or until the application has ended. Raises RunError where nothing is served, or
    no process has the name.
    """
    served = find_served(app_name, StateFolder())
    found = log_files(Path(served.log_folder), app_name, ray=served.ray_address is not None)
    chosen = {name: path for name, path in found.items() if name.lower().startswith((process or "").lower())}
    if not chosen:
        names = ", ".join(found) or "none"
        raise RunError(f"no process of {app_name} with a log here is called {process}, there are: {names}")
    for name, path in chosen.items():
        say(f"{name}: {path}")
    command = ["tail", "-n", "+1" if tail is None else str(tail), *map(str, chosen.values())]
    if follow:
        command += ["-F", *([] if served.process_id is None else [f"--pid={served.process_id}"])]
    try:
        return subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        return 0
