"""A simulated scheduler: the real service and server, with a watched core."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from protos import scheduler_pb2_grpc
from services.scheduler.epochs import EpochAuthority
from services.scheduler.server import SchedulerServer, SchedulerServerOptions
from services.scheduler.service import SchedulerService
from services.scheduler.session import GatewaySession, SessionOptions
from services.scheduler.workers.worker_link import LinkOptions
from services.scheduler.workers.worker_set import RegistryOptions
from tests.sim.cell.process import Process
from tests.sim.cell.rpc.handlers import Handlers
from tests.sim.cell.rpc.network import Listener
from tests.sim.cell.virtual_time import result_of
from tests.sim.cell.watched_core import WatchedCore
from tests.sim.cell.worker import SimulatedWorker

if TYPE_CHECKING:
    from tests.sim.cell.schedulers import CellSchedulers
    from tests.sim.cell.world import World

# Shorter than in service, so that what they wait for happens within a schedule.
LINK_OPTIONS = LinkOptions(
    connect_timeout=1.0, step_timeout=1.5, first_backoff=0.05, longest_backoff=0.5, ping_interval=0.5
)
SERVER_OPTIONS = SchedulerServerOptions(
    SessionOptions(lease_seconds=2.0), RegistryOptions(retry_seconds=0.5, forget_seconds=3.0, answer_seconds=0.5)
)


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
        handlers = Handlers()
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self.server, handlers)
        world.network.listen(self.address, Listener(self.process, handlers.methods))
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
