"""Worker processes on this machine, none of which outlives its parent."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from spool.engine.cpu.isa import AUTO
from spool.scheduler.messages import Role
from spool.services.launch.child_process import ChildGroup, ChildProcess, Command, ProcessStartError, Progress
from spool.services.launch.process_tuning import compute_environment
from spool.services.rpc.channel_security import SECURITY_VARIABLE, ChannelSecurity

__all__ = ["ProcessStartError", "RunningWorker", "WorkerLaunch", "WorkerLauncher"]


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """How to start one worker.

    `settings` go to the worker's engine as JSON (see engine/settings.py). `threads` bounds the compute threads of the
    process (0: the libraries decide). `module` is the Python module to run, which must report the same events as
    spool.services.worker.process. Raises ValueError naming field, value and limit.
    """

    role: Role
    settings: Mapping[str, Any]
    threads: int = 0
    name: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = "spool.services.worker.process"

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= 1024:
            raise ValueError(f"threads is {self.threads}, must be between 0 and 1024")

    def command(self, security: ChannelSecurity, port: int) -> Command:
        settings = dict(self.settings) | ({"threads": self.threads} if self.threads else {})
        arguments = ["--role", self.role.value, "--settings", json.dumps(settings), "--watch-stdin"]
        arguments += ["--port", str(port)]
        computing = compute_environment(self.threads, self.settings.get("cpu_isa", AUTO))
        variables = {**computing, SECURITY_VARIABLE: security.to_json(), **self.environment}
        return Command(self.module, arguments, variables)


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker that has reported itself ready."""

    worker_id: str
    role: Role
    address: str
    process_id: int


class WorkerLauncher(ChildGroup):
    """Runs workers as child processes for as long as the `async with` block lasts.

    Entering the block starts all workers at once and waits until the last one is ready. If one fails, ProcessStartError
    gives the reason of the first failure, and no worker is left running. Leaving the block stops the workers. `on_exit`
    is called with the id of every worker that dies, and the reason.

    `security` says who may call the workers. Their log files lie in a folder that is removed at the end.
    """

    def __init__(
        self,
        launches: Sequence[WorkerLaunch],
        *,
        on_loading: Progress = lambda worker_id, message, fraction: None,
        on_exit: Callable[[str, str], None] = lambda worker_id, reason: None,
        start_timeout_seconds: float = 900.0,
        security: ChannelSecurity | None = None,
    ) -> None:
        super().__init__(on_exit, start_timeout_seconds=start_timeout_seconds)
        self._logs = tempfile.TemporaryDirectory(prefix="spool-workers-", ignore_cleanup_errors=True)
        self._workers: dict[str, tuple[Role, ChildProcess]] = {}
        numbers: Counter[Role] = Counter()
        for launch in launches:
            worker_id = launch.name or f"{launch.role.value}-{numbers[launch.role]}"
            numbers[launch.role] += 1
            if worker_id in self._workers:
                raise ValueError(f"launches hold the name {worker_id} twice")
            command = partial(launch.command, security or ChannelSecurity())
            child = ChildProcess(worker_id, command, Path(self._logs.name) / f"{worker_id}.log", on_loading)
            self._workers[worker_id] = launch.role, child

    @property
    def workers(self) -> tuple[RunningWorker, ...]:
        """In the order of the launches."""
        return tuple(
            RunningWorker(worker_id, role, child.address, child.process_id)
            for worker_id, (role, child) in self._workers.items()
        )

    def log_path(self, worker_id: str) -> Path:
        return self._workers[worker_id][1].log_path

    async def __aenter__(self) -> Self:
        try:
            await self.start(*(child for _, child in self._workers.values()))
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        self._logs.cleanup()
