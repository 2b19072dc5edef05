"""Starts the processes of a cell, starts those that die again, and stops them all."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from deploy.config.spool_config import SpoolConfig
from deploy.processes.task import TASK_VARIABLE, Task
from deploy.processes.workers import PlannedWorker
from services.launch.child_process import ChildProcess, ProcessStartError, start_all
from services.launch.process_tuning import compute_environment
from services.rpc.backoff import Backoff
from services.rpc.channel_security import SECURITY_VARIABLE, ChannelSecurity

_START_SECONDS = 900.0
_STOP_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0

Tell = Callable[[str, str, float | None], None]
"""Hears of a process by name: what it does, and how far it is with that (None: not known)."""


class CellProcess(ChildProcess):
    """One process of the cell."""

    def __init__(
        self, module: str, task: Task, security: ChannelSecurity, variables: Mapping[str, str], tell: Tell
    ) -> None:
        super().__init__(
            task.name, Path(task.folder) / f"{task.name}.log", lambda message, part: tell(task.name, message, part)
        )
        self._module = module
        self._task = task
        self._security = security
        self._variables = variables

    def command(self, port: int) -> Sequence[str]:
        # -P: a folder named `deploy` in the current directory must not shadow this package.
        return [sys.executable, "-P", "-m", self._module, self._task.name]

    def environment(self) -> Mapping[str, str]:
        port = int(self.address.rpartition(":")[2] or 0) if self._module == _SCHEDULER else 0
        task = replace(self._task, port=port)
        own = {TASK_VARIABLE: task.to_json(), SECURITY_VARIABLE: self._security.to_json()}
        return {**os.environ, **self._variables, **own}


_SCHEDULER = "deploy.processes.scheduler"
_GATEWAY = "deploy.processes.gateway"
_WORKER = "deploy.processes.worker"


class Supervisor:
    """Runs a scheduler, workers and gateways for as long as the `async with` block lasts.

    Entering the block returns once everything is up. If something does not start, ProcessStartError gives the reason,
    and nothing is left running. `folder` takes the logs, one file for each process. Processes end when this one does,
    however that ends.
    """

    def __init__(
        self,
        config: SpoolConfig,
        workers: Sequence[PlannedWorker],
        security: ChannelSecurity,
        folder: Path,
        tell: Tell,
    ) -> None:
        self._config = config
        self._workers = workers
        self._security = security
        self._folder = folder
        self._tell = tell
        self._children: list[CellProcess] = []
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def scheduler_address(self) -> str:
        """Known inside the block."""
        return self._children[0].address

    async def __aenter__(self) -> Self:
        scheduler = self._child(_SCHEDULER, self._task("scheduler"), {})
        try:
            await self._start([scheduler])
            others = [
                self._child(_GATEWAY, self._task(f"gateway-{number}", scheduler.address), {})
                for number in range(self._config.gateway.replicas)
            ]
            others += [self._worker(worker, scheduler.address) for worker in self._workers]
            await self._start(others)
        except BaseException:
            await self._stop()
            raise
        self._watchers = [asyncio.create_task(self._keep(child)) for child in self._children]
        return self

    async def watch(self, stop: asyncio.Event) -> None:
        """Returns once `stop` is set. Raises whatever keeps a process from being watched any longer."""
        stopping = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait({stopping, *self._watchers}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for task in done:
            task.result()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        outcomes = await asyncio.gather(*self._watchers, return_exceptions=True)
        await self._stop()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    def _task(self, name: str, scheduler: str = "") -> Task:
        return Task(name, str(self._folder), self._config.plain(), scheduler)

    def _worker(self, worker: PlannedWorker, scheduler: str) -> CellProcess:
        task = replace(self._task(worker.name, scheduler), role=worker.role.value, engine=worker.engine)
        variables = compute_environment(worker.threads, self._config.engine.cpu_isa)
        return self._child(_WORKER, task, variables | self._config.group(worker.role).environment)

    def _child(self, module: str, task: Task, variables: Mapping[str, str]) -> CellProcess:
        child = CellProcess(module, task, self._security, variables, self._tell)
        self._children.append(child)
        return child

    async def _start(self, children: Sequence[CellProcess]) -> None:
        await start_all(self._start_one(child) for child in children)

    async def _start_one(self, child: CellProcess) -> None:
        self._tell(child.name, "starting", None)
        await child.start(_START_SECONDS)
        self._tell(child.name, "up", 1.0)

    async def _keep(self, child: CellProcess) -> None:
        """Starts the process again whenever it has died."""
        while True:
            reason = await child.wait()
            self._tell(child.name, f"died: {reason}", None)
            backoff, up = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS), False
            while not up:
                await backoff.pause()
                try:
                    await self._start_one(child)
                    up = True
                except ProcessStartError as error:
                    self._tell(child.name, str(error), None)

    async def _stop(self) -> None:
        try:
            await asyncio.gather(*(child.stop(_STOP_SECONDS) for child in self._children))
        finally:
            for child in self._children:
                child.kill()
