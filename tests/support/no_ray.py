"""`spool serve --no-ray` at work, and its processes by their names."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import yaml

from tests.support.command_line import started
from tests.support.ports import free_ports
from tests.support.waiting import LONG, wait_until


class NoRay:
    def __init__(self, process: Popen[str], url: str, address: str, environment: dict[str, str]) -> None:
        self.process = process
        self.url = url
        self.address = address
        self.environment = environment
        self.lines: list[str] = []
        """Everything that the command has said so far."""
        self._killed: Counter[str] = Counter()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, line: str, times: int = 1) -> None:
        def heard() -> bool:
            assert self.process.poll() is None, "\n".join(self.lines)
            return self.lines.count(line) >= times

        wait_until(heard, f"{line} in {self.lines}", 4 * LONG)

    def wait_until_up(self) -> None:
        """All that it started, and those that were killed again."""
        self.wait_for("Ctrl-C stops it.")
        for name, times in self._killed.items():
            self.wait_for(f"{name}: up", 1 + times)

    def process_id(self, name: str) -> int:
        """Of the process that `name` is at present."""
        (found,) = [
            child.pid for child in psutil.Process(self.process.pid).children() if child.cmdline()[-1:] == [name]
        ]
        return found

    def kill(self, *names: str, by: signal.Signals = signal.SIGKILL) -> None:
        for process_id in [self.process_id(name) for name in names]:
            os.kill(process_id, by)
        self._killed.update(names)


@contextmanager
def served_without_ray(
    folder: Path, *models: object, environment: dict[str, str] | None = None, **settings: Any
) -> Iterator[NoRay]:
    """On free ports, from a spool.yaml with these `settings` in `folder`; gone when the block ends. Its state is there
    too, unless the `environment` says otherwise."""
    port, grpc_port = free_ports(2)
    (folder / "spool.yaml").write_text(yaml.safe_dump({"metrics": {"scheduler_address": None}, **settings}))
    environment = environment or {"SPOOL_STATE": str(folder / "state")}
    command = ["serve", *models, "--no-ray", "--threads", 1, "--port", port, "--grpc-port", grpc_port]
    with started(*command, cwd=folder, environment=environment) as process:
        yield NoRay(process, f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}", environment)
