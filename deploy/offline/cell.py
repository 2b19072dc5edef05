"""Starts the workers of a run and hands out scheduler services over them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.errors import RunError, UsageError
from spool.deploy.progress import Reporter
from spool.deploy.workers import cell_workers
from spool.engine.settings import EngineSettings
from spool.scheduler.config import SchedulerConfig
from spool.scheduler.messages import Role
from spool.services.launch.launcher import ProcessStartError, RunningWorker, WorkerLaunch, WorkerLauncher
from spool.services.rpc.channel_security import ChannelSecurity, random_token
from spool.services.scheduler.epochs import EpochAuthority, MemoryRegister
from spool.services.scheduler.service import SchedulerService
from spool.services.scheduler.workers.pairing import PairingError
from spool.services.scheduler.workers.worker_link import LinkOptions, WorkerEndpoint, WorkerUnreachableError

# A first step on a busy machine takes long; a worker that died is noticed by its stream, not by this.
_STEP_SECONDS = 600.0
_CONNECT_SECONDS = 60.0
# A worker of this machine that answers no ping waits for a core, unless somebody stopped it.
_SILENCE_SECONDS = 30.0

# Positions whose KV is small compared with any model's weights.
_SMALL_KV_POSITIONS = 65536


class Cell:
    """Running workers, used by one scheduler service after the other."""

    def __init__(self) -> None:
        # Loopback is open to every user of the machine.
        self.security = ChannelSecurity(token=random_token())
        self.workers: dict[str, RunningWorker] = {}
        self._epochs = EpochAuthority(MemoryRegister())
        self._last_death = ""

    @asynccontextmanager
    async def service(self, config: SchedulerConfig, drafting: bool) -> AsyncIterator[SchedulerService]:
        """A scheduler without sequences over all workers, or only over the targets."""
        endpoints = [
            WorkerEndpoint(worker.worker_id, worker.role, worker.address)
            for worker in self.workers.values()
            if drafting or worker.role is Role.TARGET
        ]
        links = LinkOptions(
            connect_timeout=_CONNECT_SECONDS, step_timeout=_STEP_SECONDS, silence_timeout=_SILENCE_SECONDS
        )
        epoch = await self._epochs.claim()
        async with SchedulerService(
            config,
            scheduler_epoch=epoch,
            link_options=links,
            security=self.security,
        ) as service:
            try:
                await service.workers.add(endpoints)
            except PairingError as error:
                raise UsageError(str(error)) from error
            except WorkerUnreachableError as error:
                raise RunError(str(error)) from error
            yield service

    def mark_lost(self, worker_id: str, reason: str) -> None:
        """The worker's process has ended."""
        self.workers.pop(worker_id, None)
        self._last_death = f"{worker_id} {reason}"

    def check_alive(self) -> None:
        """Raises `RunError` if no target is left. Draft workers may die: their sequences decode without."""
        if not any(worker.role is Role.TARGET for worker in self.workers.values()):
            raise RunError(f"{self._last_death}; no target worker is left")


@asynccontextmanager
async def running_cell(config: SpoolConfig, lengths: Sequence[int], reporter: Reporter) -> AsyncIterator[Cell]:
    """Starts the workers of a configuration; they stop at the end of the block. Raises `RunError`.

    `lengths` are the positions of the longest sequences that can be under way at once.
    """
    cell = Cell()

    def on_exit(worker_id: str, reason: str) -> None:
        reporter.stage(worker_id, reason, None)
        cell.mark_lost(worker_id, reason)

    launcher = WorkerLauncher(
        worker_launches(config, lengths), on_loading=reporter.stage, on_exit=on_exit, security=cell.security
    )
    try:
        async with launcher:
            cell.workers |= {worker.worker_id: worker for worker in launcher.workers}
            yield cell
    except ProcessStartError as error:
        raise RunError(str(error)) from error


def worker_launches(config: SpoolConfig, lengths: Sequence[int]) -> list[WorkerLaunch]:
    """The workers of a run, targets first."""

    def engine_of(role: Role, device: str) -> EngineSettings:
        memory, head = config.engine.kv_memory, config.draft_head
        engine = config.engine.for_worker(config.models, role, device, config.threads(role), memory, head)
        # Every sequence may leave a page partly filled.
        pages = sum(-(-length // engine.page_size) + 1 for length in lengths)
        if device == "cpu" and engine.kv_memory_bytes is None and pages * engine.page_size <= _SMALL_KV_POSITIONS:
            # Memory is shared with everything else here, and filling it with zeros takes seconds.
            engine = replace(engine, kv_pages=pages)
        return engine

    return cell_workers(config, engine_of)
