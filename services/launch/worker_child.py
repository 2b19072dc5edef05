"""One worker process as its parent sees it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.cpu.isa import AUTO
from scheduler.messages import Role
from services.launch.child_process import ChildProcess
from services.launch.process_tuning import compute_environment
from services.rpc.channel_security import SECURITY_VARIABLE, ChannelSecurity


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """How to start one worker.

    `settings` go to the worker's engine as JSON (see engine/settings.py). `threads` bounds the compute threads of the
    process (0: the libraries decide), `cpus` the CPUs that it runs on (empty: any). `module` is the Python module to
    run, which must report the same events as services.worker.process. Raises ValueError naming field, value and limit.
    """

    role: Role
    settings: Mapping[str, Any]
    threads: int = 0
    cpus: tuple[int, ...] = ()
    name: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = "services.worker.process"
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= 1024:
            raise ValueError(f"threads is {self.threads}, must be between 0 and 1024")
        if any(cpu < 0 for cpu in self.cpus):
            raise ValueError(f"cpus is {self.cpus}, must be numbers of CPUs")


class WorkerChild(ChildProcess):
    """The process of one worker."""

    def __init__(
        self,
        worker_id: str,
        launch: WorkerLaunch,
        log_path: Path,
        on_loading: Callable[[str, float | None], None],
        security: ChannelSecurity,
    ) -> None:
        super().__init__(f"worker {worker_id}", log_path, on_loading)
        self.worker_id = worker_id
        self.launch = launch
        self._security = security

    def command(self, port: int) -> Sequence[str]:
        launch = self.launch
        settings = dict(launch.settings)
        if launch.threads:
            settings["threads"] = launch.threads
        return [
            # -P: a folder named `services` in the current directory must not shadow this package.
            *(sys.executable, "-P", "-m", launch.module),
            *("--role", launch.role.value, "--settings", json.dumps(settings), "--watch-stdin"),
            *("--port", str(port)),
            *("--cpus", ",".join(map(str, launch.cpus)), "--log-level", launch.log_level),
        ]

    def environment(self) -> Mapping[str, str]:
        launch = self.launch
        computing = compute_environment(launch.threads, launch.settings.get("cpu_isa", AUTO))
        return {**os.environ, **computing, SECURITY_VARIABLE: self._security.to_json(), **launch.environment}
