"""The task that a parent gives to a process of a cell, and the run of that process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spool.deploy.config.loading import configuration_from
from spool.deploy.config.spool_config import SpoolConfig
from spool.engine.errors import one_line
from spool.services.rpc.channel_security import SECURITY_VARIABLE, ChannelSecurity
from spool.services.worker.process import EventPipe, stop_when_stdin_ends

TASK_VARIABLE = "SPOOL_PROCESS"
"""Environment variable with the task, as JSON; the configuration in it may hold secrets."""

_HEALTH_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """What one process does: `settings` is the configuration as plain data, `port` where a scheduler listens (0: any).

    `folder` is that of all processes of the cell; `role` and `engine` are a worker's.
    """

    name: str
    folder: str
    settings: dict[str, Any]
    role: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    port: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Surroundings:
    """A process's task, as it works with it."""

    task: Task
    config: SpoolConfig
    security: ChannelSecurity
    events: EventPipe

    @property
    def host(self) -> str:
        """Where schedulers and workers listen."""
        return self.config.internal.host or "127.0.0.1"

    @property
    def all_stop(self) -> bool:
        """Whether the parent ends, and all its processes: our standard input has ended."""
        return bool(select.select([0], [], [], 0)[0])

    @property
    def _address_file(self) -> Path:
        return Path(self.task.folder) / "scheduler.address"

    def publish_address(self, address: str) -> None:
        """The scheduler's, for `find_scheduler` in the other processes. It keeps it when it is started again."""
        unfinished = self._address_file.with_suffix(".unfinished")
        unfinished.write_text(address, encoding="utf-8")
        unfinished.replace(self._address_file)

    async def find_scheduler(self) -> str:
        """Raises ConnectionError while there has been none: the processes of a cell start side by side."""
        try:
            return self._address_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConnectionError("the scheduler has not started yet") from None


class FileEpochs:
    """A register for `EpochAuthority` that lasts as long as the folder: a file for each number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    async def taken(self) -> list[int]:
        return [int(file.name) for file in self._folder.iterdir()]

    async def take(self, number: int) -> bool:
        try:
            (self._folder / str(number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    async def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            (self._folder / str(number)).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Up:
    """A service that is ready. `check_health` raises once the process must be started again. `leave` is called before
    the service ends where others of its kind stay."""

    address: str
    check_health: Callable[[], None]
    leave: Callable[[], Awaitable[object]] | None = None


Start = Callable[[Surroundings, AsyncExitStack], Awaitable[Up]]


def run_process(start: Start) -> int:
    """Starts a service, reports it ready, and runs it until SIGTERM, SIGINT or the end of standard input: exit code 0.

    Exit code 1, with the reason in the log, for one that does not start or is not well.
    """
    events = EventPipe()
    try:
        # Removed from the environment, so that processes started by libraries do not inherit them.
        task = Task(**json.loads(os.environ.pop(TASK_VARIABLE)))
        security = ChannelSecurity.from_json(os.environ.pop(SECURITY_VARIABLE))
        config = configuration_from(task.settings)
        config.logging.install()
        stop_when_stdin_ends()
        asyncio.run(_run(start, Surroundings(task, config, security, events)))
    except Exception as error:
        logger.exception("the process ends")
        events.send("failed", error=one_line(error))
        logging.shutdown()
        # A step that hangs cannot be stopped, and the interpreter would wait for it.
        os._exit(1)
    return 0


async def _run(start: Start, surroundings: Surroundings) -> None:
    async with AsyncExitStack() as running:
        up = await start(surroundings, running)
        # Only now: until then a signal ends the process at once.
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        surroundings.events.send("ready", address=up.address, process_id=os.getpid())
        while not stop.is_set():
            up.check_health()
            try:
                async with asyncio.timeout(_HEALTH_SECONDS):
                    await stop.wait()
            except TimeoutError:
                continue
        if up.leave is not None and not surroundings.all_stop:
            await up.leave()
