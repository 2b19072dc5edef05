"""Simulated schedulers: the real service and server, with a watched core, one after the other or side by side."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

import pytest

from spool.services.scheduler import service
from spool.services.scheduler.epochs import EpochAuthority, MemoryRegister
from spool.services.scheduler.server import SchedulerServer, SchedulerServerOptions
from spool.services.scheduler.service import SchedulerService
from spool.services.scheduler.session import SessionOptions
from spool.services.scheduler.workers.worker_link import LinkOptions
from spool.services.scheduler.workers.worker_set import RegistryOptions
from tests.sim.cell.process import Process
from tests.sim.cell.virtual_time import result_of
from tests.sim.cell.watched_core import WatchedCore
from tests.support.core_state import check_state

if TYPE_CHECKING:
    from tests.sim.cell.world import World

# Shorter than in service, so that what they wait for happens within a schedule.
LINK_OPTIONS = LinkOptions(
    connect_timeout=1.0, step_timeout=1.5, first_backoff=0.05, longest_backoff=0.5, ping_interval=0.5
)
SERVER_OPTIONS = SchedulerServerOptions(
    SessionOptions(lease_seconds=2.0), RegistryOptions(retry_seconds=0.5, forget_seconds=3.0, answer_seconds=0.5)
)

_NOTICED_AFTER = 0.3
"""Seconds until a scheduler that has closed is replaced, as a health check would."""


class SimulatedScheduler:
    """One start of a scheduler."""

    def __init__(self, world: World, cell: CellSchedulers, name: str) -> None:
        self.world = world
        self.cell = cell
        self.process = Process(world.network, name)
        self.address = f"{name}:1"
        self.process.run(self._start)

    def _start(self) -> None:
        world, security = self.world, self.process
        epochs = EpochAuthority(self.cell.register)
        self.watched = WatchedCore(world, self)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service, "SchedulerCore", lambda _config: self.watched)
            self.service = SchedulerService(
                world.plan.config,
                scheduler_epoch=result_of(epochs.claim()),
                epochs=epochs,
                link_options=LINK_OPTIONS,
                security=security,  # type: ignore[arg-type]
            )
        self.server = SchedulerServer(self.service, security=security, options=SERVER_OPTIONS)  # type: ignore[arg-type]
        self.process.spawn(self.server.start())
        self.process.spawn(self._watch())

    async def _watch(self) -> None:
        reason = await self.service.wait_closed()
        self.cell.closed(self, reason)

    def check_idle(self) -> str | None:
        core = self.service.core
        try:
            check_state(core)
        except AssertionError as error:
            return f"{self.process.name} miscounts: {error}"
        snapshot = core.snapshot()
        if snapshot.live:
            return f"{self.process.name} has {snapshot.live} sequences"
        for worker in snapshot.workers:
            if worker.sequences or worker.free_pages != worker.total_pages or worker.steps_in_flight:
                return f"{self.process.name} thinks that {worker} is not idle"
        return None


class CellSchedulers:
    """The schedulers of one cell, and how they are found. `current` is the one that has the name."""

    def __init__(self, world: World, number: int) -> None:
        self.number = number
        self.register = MemoryRegister()
        self.current: SimulatedScheduler | None = None
        self.old_name: tuple[str, float] = ("", 0.0)
        """What half of the processes take for the scheduler's address, and until when."""
        self._world = world
        self._all: list[SimulatedScheduler] = []

    async def resolve(self, process: Process) -> str:
        """Where the scheduler is; some hear late of a new one."""
        await asyncio.sleep(0.001)
        old, until = self.old_name
        if self._world.loop.now < until and _of_two(process.name, old):
            return old
        if self.current is None:
            raise OSError("no scheduler has a name")
        return self.current.address

    def start_scheduler(self) -> None:
        if self._world.plan.register_is_lost and not any(scheduler.process.alive for scheduler in self._all):
            self.register.numbers.clear()
        name = f"{f'cell{self.number}' if self.number else ''}scheduler{len(self._all)}"
        self._world.note("scheduler starts", name)
        self.current = SimulatedScheduler(self._world, self, name)
        self._all.append(self.current)

    def add_scheduler(self, shared: SimulatedScheduler, seconds: float) -> None:
        """A new one gets the name, while the old one lives on for some time after `seconds`."""
        self.start_scheduler()
        self._world.loop.call_later(seconds + 0.5, self.kill, shared)

    def kill(self, scheduler: SimulatedScheduler) -> None:
        if scheduler.process.alive:
            self._world.note("scheduler dies", scheduler.process.name)
            scheduler.process.kill()

    def crash(self, scheduler: SimulatedScheduler, seconds: float) -> None:
        """It dies, and is replaced after so many seconds."""
        self.kill(scheduler)
        self._world.loop.call_later(seconds, self._replace, scheduler)

    def kill_old_ones(self) -> None:
        self.old_name = ("", 0.0)
        for scheduler in self._all:
            if scheduler is not self.current:
                self.kill(scheduler)

    def _replace(self, scheduler: SimulatedScheduler) -> None:
        self.kill(scheduler)
        if scheduler is self.current:
            self.start_scheduler()

    def closed(self, scheduler: SimulatedScheduler, reason: str) -> None:
        if not scheduler.process.alive:
            return
        self._world.note("scheduler closed", scheduler.process.name, reason)
        fenced = "Fenced" in reason or "has taken over" in reason
        if not fenced or len(self._all) == 1:
            self._world.fail(f"{scheduler.process.name} closed: {reason}")
        self._world.loop.call_later(_NOTICED_AFTER, self._replace, scheduler)


def _of_two(*parts: str) -> bool:
    """One half of all, the same in every process."""
    return hashlib.blake2b("/".join(parts).encode(), digest_size=1).digest()[0] % 2 == 1
