"""Simulated schedulers: the real service and server, with a watched core, one after the other or side by side."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

from protos import scheduler_pb2_grpc
from services.scheduler.epochs import EpochAuthority, MemoryRegister
from services.scheduler.server import SchedulerServer, SchedulerServerOptions
from services.scheduler.service import SchedulerService
from services.scheduler.session import GatewaySession, SessionOptions
from services.scheduler.workers.worker_link import LinkOptions
from services.scheduler.workers.worker_set import RegistryOptions
from tests.sim.cell.faults import UNHEARD
from tests.sim.cell.process import Process
from tests.sim.cell.virtual_time import result_of
from tests.sim.cell.watched_core import WatchedCore
from tests.sim.cell.worker import SimulatedWorker

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
_CLOSED_AFTER = 0.2
"""Seconds until a scheduler that was fenced off has heard of it."""


class _OrderedSet(dict[Any, None]):
    """In the place of a set whose order would depend on where its members lie in memory."""

    def add(self, member: Any) -> None:
        self[member] = None

    def discard(self, member: Any) -> None:
        self.pop(member, None)


class _Server(SchedulerServer):
    """Listens on the simulated network."""

    async def start(self) -> str:
        self._sessions = _OrderedSet()  # type: ignore[assignment]
        self._chores = [asyncio.create_task(self._await_close()), asyncio.create_task(self._sweep())]
        return ""

    async def _set_health(self, status: Any) -> None:
        return


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
        self.epoch = result_of(epochs.claim())
        self.service = SchedulerService(
            world.plan.config,
            scheduler_epoch=self.epoch,
            epochs=epochs,
            link_options=LINK_OPTIONS,
            security=security,  # type: ignore[arg-type]
        )
        self.service._core = WatchedCore(world, self)
        self.server = _Server(self.service, security=security, options=SERVER_OPTIONS)  # type: ignore[arg-type]
        add = scheduler_pb2_grpc.add_SchedulerServicer_to_server
        world.network.listen(self.address, self.process, add, self.server)
        self.process.spawn(self.server.start())
        self.process.spawn(self._watch())

    async def _watch(self) -> None:
        reason = await self.service.wait_closed()
        self.cell.closed(self, reason)

    def speaks_to(self, worker: SimulatedWorker) -> bool:
        """Whether the worker's state is of this scheduler's making."""
        description = self.service.workers.descriptions.get(worker.plan.worker_id)
        of_this_start = description is not None and description.worker_epoch == worker.executor.worker_epoch
        return of_this_start and self.epoch <= worker.executor.scheduler_epoch <= self.service.workers.epoch

    def kill(self) -> None:
        self.process.kill()
        self.process.run(lambda: self.service._shut("killed"))

    @property
    def open(self) -> bool:
        return self.service.closed_because is None

    @property
    def sessions(self) -> list[GatewaySession]:
        return list(self.server._sessions)

    def orphans(self) -> list[int]:
        """Sequences that nobody will be told of."""
        sessions = self.server._sessions
        return [number for number, sink in self.service._sinks.items() if sink._session not in sessions]  # type: ignore[attr-defined]

    def check_idle(self) -> str | None:
        core = self.service.core
        try:
            core.check_integrity()
        except RuntimeError as error:
            return f"{self.process.name}: {error}"
        snapshot = core.snapshot()
        if snapshot.live or self.service._sinks:
            return f"{self.process.name} has {snapshot.live} sequences and {len(self.service._sinks)} sinks"
        for worker in snapshot.workers:
            if worker.sequences or worker.free_pages != worker.total_pages or worker.steps_in_flight:
                return f"{self.process.name} thinks that {worker} is not idle"
        for session in self.sessions:
            if session._live:
                return f"{self.process.name} has a session with {len(session._live)} sequences"
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
