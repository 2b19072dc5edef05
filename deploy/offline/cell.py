"""Starts the workers of a run and hands out scheduler services over them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace

from deploy.errors import RunError, UsageError
from deploy.offline.devices import worker_devices
from deploy.options import NGRAM, RunSettings
from deploy.progress import Reporter
from engine.errors import GpuMemoryError
from engine.models.memory_plan import ModelMemory, model_memory
from engine.models.source import resolve_model
from scheduler.config import SchedulerConfig
from scheduler.messages import Role
from services.launch.launcher import LoadingMessage, ProcessStartError, RunningWorker, WorkerLaunch, WorkerLauncher
from services.observability.observer import ServiceObserver
from services.rpc.channel_security import ChannelSecurity, random_token
from services.scheduler.epochs import EpochAuthority, MemoryRegister
from services.scheduler.service import SchedulerService
from services.scheduler.workers.pairing import PairingError
from services.scheduler.workers.worker_link import LinkOptions, WorkerEndpoint, WorkerUnreachableError

# A first step on a busy machine takes long; a worker that died is noticed by its stream, not by this.
_STEP_SECONDS = 600.0
_CONNECT_SECONDS = 60.0
# A worker of this machine that answers no ping waits for a core, unless somebody stopped it.
_SILENCE_SECONDS = 30.0

# Positions whose KV is small compared with any model's weights.
_SMALL_KV_POSITIONS = 65536


class Cell:
    """Running workers, used by one scheduler service after the other. All cells that share a worker share `epochs`."""

    def __init__(self, workers: Sequence[RunningWorker], security: ChannelSecurity, epochs: EpochAuthority) -> None:
        self._workers = {worker.worker_id: worker for worker in workers}
        self._security = security
        self._epochs = epochs
        self._last_death = ""

    @asynccontextmanager
    async def service(
        self, config: SchedulerConfig, drafting: bool, observers: Iterable[ServiceObserver] = ()
    ) -> AsyncIterator[SchedulerService]:
        """A scheduler without sequences over all workers, or only over the targets."""
        endpoints = [
            WorkerEndpoint(worker.worker_id, worker.role, worker.address)
            for worker in self._workers.values()
            if drafting or worker.role is Role.TARGET
        ]
        links = LinkOptions(
            connect_timeout=_CONNECT_SECONDS, step_timeout=_STEP_SECONDS, silence_timeout=_SILENCE_SECONDS
        )
        epoch = await self._epochs.claim()
        async with SchedulerService(
            config, scheduler_epoch=epoch, link_options=links, security=self._security, observers=observers
        ) as service:
            try:
                await service.add_workers(endpoints)
            except PairingError as error:
                raise UsageError(str(error)) from error
            except WorkerUnreachableError as error:
                raise RunError(str(error)) from error
            yield service

    def mark_lost(self, worker_id: str, reason: str) -> None:
        """The worker's process has ended."""
        self._workers.pop(worker_id, None)
        self._last_death = f"worker {worker_id} died: {reason}"

    def check_alive(self) -> None:
        """Raises `RunError` if no target is left. Draft workers may die: their sequences decode without."""
        if not any(worker.role is Role.TARGET for worker in self._workers.values()):
            raise RunError(f"{self._last_death}; no target worker is left")


@asynccontextmanager
async def running_cell(settings: RunSettings, lengths: Sequence[int], reporter: Reporter) -> AsyncIterator[Cell]:
    """Starts the workers that the settings ask for; they stop at the end of the block. Raises `RunError`.

    `lengths` are the positions of the longest sequences that can be under way at once.
    """
    async with launched_cell(worker_launches(settings, lengths), reporter) as cell:
        yield cell


@asynccontextmanager
async def launched_cell(launches: Sequence[WorkerLaunch], reporter: Reporter) -> AsyncIterator[Cell]:
    """Starts these workers; they stop at the end of the block. Raises `RunError`."""
    # Loopback is open to every user of the machine.
    security = ChannelSecurity(token=random_token())
    epochs = EpochAuthority(MemoryRegister())
    cell = Cell((), security, epochs)

    def on_loading(loading: LoadingMessage) -> None:
        reporter.stage(loading.worker_id, loading.message, loading.fraction)

    def on_exit(worker_id: str, reason: str) -> None:
        reporter.stage(worker_id, f"died: {reason}", None)
        cell.mark_lost(worker_id, reason)

    try:
        async with WorkerLauncher(launches, on_loading=on_loading, on_exit=on_exit, security=security) as launcher:
            cell = Cell(launcher.workers, security, epochs)
            yield cell
    except ProcessStartError as error:
        raise RunError(str(error)) from error


def worker_launches(settings: RunSettings, lengths: Sequence[int]) -> list[WorkerLaunch]:
    """Targets first, so that they get the first GPUs."""
    models, workers = settings.models, settings.workers
    drafts = workers.draft_replicas if settings.drafting else 0
    on_gpu = drafts if models.drafts_with_model else 0
    roles = [Role.TARGET] * workers.target_replicas + [Role.DRAFT] * on_gpu
    devices = worker_devices(models.device, [settings.engine.ranks(role) for role in roles])
    threads = settings.threads_per_worker()
    memory = {role: _memory(settings, role) for role in set(roles)} if set(devices) != {"cpu"} else {}
    launches = []
    for number, device in enumerate(devices):
        role = roles[number]
        engine = settings.engine_settings(role, device)
        if device != "cpu":
            beside = [other for place, other in enumerate(roles) if devices[place] == device and place != number]
            engine = replace(engine, gpu_peers=tuple(memory[other] for other in beside))
        # Every sequence may leave a page partly filled.
        pages = sum(-(-length // engine.page_size) + 1 for length in lengths)
        kv_is_given = engine.kv_pages is not None or engine.kv_memory_bytes is not None
        if device == "cpu" and not kv_is_given and pages * engine.page_size <= _SMALL_KV_POSITIONS:
            # Memory is shared with everything else here, and filling it with zeros takes seconds.
            engine = replace(engine, kv_pages=pages)
        launches.append(WorkerLaunch(role, asdict(engine), threads=threads))
    launches += [WorkerLaunch(Role.DRAFT, {"model": NGRAM}, threads=1)] * (drafts - on_gpu)
    return launches


def _memory(settings: RunSettings, role: Role) -> ModelMemory:
    """What a worker of this role takes of a GPU. Raises `UsageError`."""
    engine = settings.engine_settings(role, "cuda")
    folder = resolve_model(engine.model, role).folder
    if folder is None:
        raise UsageError(f"{role.value} model {engine.model} is not on this machine")
    try:
        return model_memory(
            role.value, folder, engine.dtype, engine.max_num_batched_tokens, engine.tensor_parallel_size
        )
    except GpuMemoryError as error:
        raise UsageError(str(error)) from error
