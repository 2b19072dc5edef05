"""Starts worker processes on this machine, and lets none of them outlive its parent."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from scheduler.messages import Role
from services.launch.child_process import ProcessStartError, start_all
from services.launch.worker_child import WorkerChild, WorkerLaunch
from services.rpc.channel_security import ChannelSecurity

__all__ = ["LoadingMessage", "ProcessStartError", "RunningWorker", "WorkerLaunch", "WorkerLauncher"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadingMessage:
    """What a worker is doing while it loads; `fraction` in [0, 1], None where the progress is not known."""

    worker_id: str
    role: Role
    message: str
    fraction: float | None


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker that has reported itself ready."""

    worker_id: str
    role: Role
    address: str
    process_id: int


class WorkerLauncher:
    """Runs workers as child processes for as long as the `async with` block lasts.

    Entering the block starts all workers at once and waits until the last one is ready. If one fails, ProcessStartError
    gives the reason of the first failure, and no worker is left running. Leaving the block stops the workers. With
    `restart_seconds`, a worker that dies later is started again after that time, on the same address. `on_exit` is
    called with the id of every worker that dies, and the reason.

    `security` says who may call the workers. `log_folder` gets one log file per worker; without it the log files lie in
    a folder that is removed at the end.
    """

    def __init__(
        self,
        launches: Sequence[WorkerLaunch],
        *,
        on_loading: Callable[[LoadingMessage], None] | None = None,
        on_exit: Callable[[str, str], None] | None = None,
        log_folder: Path | None = None,
        start_timeout_seconds: float = 900.0,
        stop_timeout_seconds: float = 10.0,
        restart_seconds: float | None = None,
        security: ChannelSecurity | None = None,
    ) -> None:
        self._launches = {_worker_id(launches, index): launch for index, launch in enumerate(launches)}
        if len(self._launches) < len(launches):
            raise ValueError(f"launches hold the same name twice: {', '.join(launch.name for launch in launches)}")
        self._on_loading = on_loading
        self._on_exit = on_exit
        self._log_folder = log_folder
        self._start_timeout = start_timeout_seconds
        self._stop_timeout = stop_timeout_seconds
        self._restart_seconds = restart_seconds
        self._security = security or ChannelSecurity()
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None
        self._children: dict[str, WorkerChild] = {}
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def workers(self) -> tuple[RunningWorker, ...]:
        """In the order of the launches. A restarted worker keeps its address."""
        return tuple(
            RunningWorker(worker_id, child.launch.role, child.address, child.process_id)
            for worker_id, child in self._children.items()
        )

    def log_path(self, worker_id: str) -> Path:
        return self._children[worker_id].log_path

    async def __aenter__(self) -> Self:
        if self._log_folder is None:
            self._own_folder = tempfile.TemporaryDirectory(prefix="spool-workers-", ignore_cleanup_errors=True)
        folder = self._log_folder or Path(self._own_folder.name if self._own_folder else ".")
        folder.mkdir(parents=True, exist_ok=True)
        for worker_id, launch in self._launches.items():
            self._children[worker_id] = WorkerChild(
                worker_id, launch, folder / f"{worker_id}.log", self._hear(worker_id, launch.role), self._security
            )
        try:
            await self._start_all()
        except BaseException:
            await self._stop_all()
            raise
        self._watchers = [asyncio.create_task(self._watch(child)) for child in self._children.values()]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await self._stop_all()
        for outcome in await asyncio.gather(*self._watchers, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def _start_all(self) -> None:
        await start_all(child.start(self._start_timeout) for child in self._children.values())

    async def _stop_all(self) -> None:
        try:
            await asyncio.gather(*(child.stop(self._stop_timeout) for child in self._children.values()))
        finally:
            for child in self._children.values():
                child.kill()
            if self._own_folder is not None:
                self._own_folder.cleanup()

    async def _watch(self, child: WorkerChild) -> None:
        """Reports the death of a ready worker and, with `restart_seconds`, starts it again until it is ready."""
        while True:
            reason = await child.wait()
            logger.warning("%s died: %s", child.worker_id, reason)
            if self._on_exit is not None:
                self._on_exit(child.worker_id, reason)
            if self._restart_seconds is None:
                return
            restarted = False
            while not restarted:
                await asyncio.sleep(self._restart_seconds)
                try:
                    await child.start(self._start_timeout)
                    restarted = True
                except ProcessStartError as error:
                    logger.warning("%s", error)

    def _hear(self, worker_id: str, role: Role) -> Callable[[str, float | None], None]:
        def hear(message: str, fraction: float | None) -> None:
            if self._on_loading is not None:
                self._on_loading(LoadingMessage(worker_id, role, message, fraction))

        return hear


def _worker_id(launches: Sequence[WorkerLaunch], index: int) -> str:
    launch = launches[index]
    before = sum(1 for other in launches[:index] if other.role is launch.role)
    return launch.name or f"{launch.role.value}-{before}"
