"""The schedulers of one simulated cell, one after the other or side by side, and how they are found."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

from services.scheduler.epochs import MemoryRegister
from tests.sim.cell.faults import UNHEARD
from tests.sim.cell.process import Process
from tests.sim.cell.scheduler import SimulatedScheduler

if TYPE_CHECKING:
    from tests.sim.cell.world import World

_NOTICED_AFTER = 0.3
"""Seconds until a scheduler that has closed is replaced, as a health check would."""
_CLOSED_AFTER = 0.2
"""Seconds until a scheduler that was fenced off has heard of it."""


class CellSchedulers:
    """`current` is the one that has the name."""

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
            scheduler.kill()

    def crash(self, scheduler: SimulatedScheduler, seconds: float) -> None:
        """It dies, and is replaced after so many seconds."""
        self.kill(scheduler)
        self._world.loop.call_later(seconds, self._replace, scheduler)

    def kill_all(self) -> None:
        for scheduler in self._all:
            scheduler.kill()

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

    def expect_close(self, epoch: int) -> None:
        """The scheduler that spoke with this epoch was refused for another's sake: it closes, if it hears of it."""
        highest = max(scheduler.service.workers.epoch for scheduler in self._all)
        for scheduler in self._all:
            alive = scheduler.process.alive and scheduler.open
            if alive and scheduler.epoch <= epoch <= scheduler.service.workers.epoch < highest:
                self._world.loop.call_later(_CLOSED_AFTER, self._check_closed, scheduler)

    def _check_closed(self, scheduler: SimulatedScheduler) -> None:
        heard = not self._world.faults.struck.keys() & UNHEARD
        if heard and scheduler.process.alive and scheduler.open:
            self._world.fail(f"{scheduler.process.name} was fenced off and goes on")


def _of_two(*parts: str) -> bool:
    """One half of all, the same in every process."""
    return hashlib.blake2b("/".join(parts).encode(), digest_size=1).digest()[0] % 2 == 1
