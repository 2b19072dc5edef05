"""A simulated process: what it runs, whom it talks to, and how it dies."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tests.sim.cell.rpc.blocking import BlockingChannel
from tests.sim.cell.rpc.calls import Call, Channel
from tests.sim.cell.virtual_time import OWNER

if TYPE_CHECKING:
    from tests.sim.cell.rpc.network import Network
    from tests.sim.cell.virtual_threads import VirtualThread

_MANY_TASKS = 256


class Process:
    """One simulated process: its tasks, its calls, and whether it lives. A dead one is neither heard nor spoken to."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.alive = True
        self.broken_until = float("-inf")
        """Until when the other end may not have noticed that a connection of this process was cut while both lived."""
        self.calls: dict[Call, None] = {}
        self.threads: list[VirtualThread] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._context = contextvars.copy_context()
        self._context.run(OWNER.set, self)
        network.processes.append(self)

    # As `security` for the services.

    tls = False
    token = ""
    metadata: tuple[tuple[str, str], ...] = ()

    def certificate(self) -> None:
        """There is no TLS here."""

    def listen(self, server: Any, host: str, port: int, certificate: None = None) -> str:
        server.process, address = self, f"{self.name}:1"
        self.network.listeners[address] = server
        return address

    def open_channel(self, address: str, silence_seconds: float | None = None) -> Channel:
        if not self.alive:
            raise OSError(f"process {self.name} is dead")
        return Channel(self, address)

    def open_blocking_channel(self, address: str, silence_seconds: float) -> BlockingChannel:
        if not self.alive:
            raise OSError(f"process {self.name} is dead")
        return BlockingChannel(self, address, silence_seconds)

    def run(self, call: Callable[[], Any]) -> Any:
        """Whatever the call starts belongs to this process."""
        return self._context.copy().run(call)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.network.loop.create_task(coroutine, context=self._context.copy())

    def adopt(self, task: asyncio.Task[Any]) -> None:
        tasks = self._tasks
        tasks.append(task)
        if len(tasks) > _MANY_TASKS and len(tasks) & (len(tasks) - 1) == 0:
            self._tasks = [task for task in tasks if not task.done()]

    @property
    def busy(self) -> bool:
        return any(not task.done() for task in self._tasks)

    def kill(self) -> None:
        """Dies on the spot: what its tasks still do on the way out reaches nobody."""
        self.alive = False
        for thread in self.threads:
            thread.shutdown()
        for task in self._tasks:
            task.cancel()
        for call in list(self.calls):
            call.break_off(f"{self.name} died")
