"""`spool serve` in a process of its own, for benchmarks that call it as its users do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from spool.deploy.cluster.served_state import STATE_VARIABLE

ROOT = Path(__file__).parents[1]
_START_SECONDS = 600.0
_STOP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is up. It took `seconds` to start; `log_folder` has the logs of its processes."""

    process: psutil.Process
    url: str
    log_folder: Path
    seconds: float

    def process_id(self, name: str) -> int:
        """Of the process that has this name at present; without Ray."""
        (found,) = [child.pid for child in self.process.children() if child.cmdline()[-1:] == [name]]
        return found


def python_path(*folders: Path) -> str:
    """PYTHONPATH with these folders first, and that of `bench`."""
    return os.pathsep.join(filter(None, (*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH"))))


@contextmanager
def serving(settings: Mapping[str, Any], without_ray: bool, say: Callable[[str], None]) -> Iterator[Served]:
    """`spool serve` with these settings, its state in a folder of its own. What it says until it is up goes to `say`.
    Raises RuntimeError where it ends before."""
    with tempfile.TemporaryDirectory(prefix="served-") as name:
        folder = Path(name)
        (folder / "spool.yaml").write_text(yaml.safe_dump(dict(settings)), encoding="utf-8")
        command = [sys.executable, "-m", "spool.deploy.cli.main", "serve", "--config", str(folder / "spool.yaml")]
        environment = {**os.environ, STATE_VARIABLE: str(folder / "state"), "PYTHONPATH": python_path()}
        began = time.monotonic()
        with subprocess.Popen(
            [*command, *(["--no-ray"] if without_ray else [])], env=environment, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                _wait_until_up(process, say)
                seconds = time.monotonic() - began
                state = json.loads((folder / "state" / "spool.json").read_text(encoding="utf-8"))
                yield Served(psutil.Process(process.pid), state["http_url"], Path(state["log_folder"]), seconds)
            finally:
                process.terminate()
                try:
                    process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()


def _wait_until_up(process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    assert process.stderr is not None
    timer = threading.Timer(_START_SECONDS, process.kill)
    timer.start()
    last = ""
    try:
        for line in process.stderr:
            last = line.strip() or last
            say(line.rstrip("\n"))
            if line.startswith("Ctrl-C"):
                threading.Thread(target=process.stderr.read, daemon=True).start()
                return
    finally:
        timer.cancel()
    raise RuntimeError(f"spool serve ended at its start: {last}")
