"""Whole cells for tests: schedulers here or in processes of their own, and stand-in workers that register with them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spool.engine.drafting.model_drafting import Draft
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.messages import FinishReason, Role
from spool.services.backend.interface import GenerationRequest
from spool.services.observability.observer import ServiceObserver
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.scheduler.epochs import EpochAuthority, MemoryRegister
from spool.services.scheduler.server import SchedulerServer, SchedulerServerOptions
from spool.services.scheduler.service import SchedulerService
from spool.services.scheduler.session import SessionOptions
from spool.services.scheduler.workers.worker_link import LinkOptions
from spool.services.scheduler.workers.worker_set import RegistryOptions
from spool.services.scheduler_client.cell_link import ClientOptions
from spool.services.scheduler_client.remote import RecoveryListener, SchedulerClient
from spool.services.scheduler_client.remote_stream import RemoteStream
from spool.services.worker.base_server import BaseWorkerServer
from spool.services.worker.drafting.remote import RemoteProposer
from spool.services.worker.drafting.server import DraftServer
from spool.services.worker.executor import StepExecutor, VerifyingEngine
from spool.services.worker.registration import RegistrationOptions, WorkerRegistration
from spool.services.worker.server import WorkerServer
from tests.support.stand_in_worker import MODEL, StandInEngine, continuation, target_executor
from tests.support.waiting import LONG, until

ROOT = Path(__file__).parents[2]
OPEN = ChannelSecurity()
LINKS = LinkOptions(connect_timeout=5, step_timeout=60, first_backoff=0.02, longest_backoff=0.2, ping_interval=0.1)
REGISTRATION = RegistrationOptions(interval=0.1, retry_interval=0.05, call_timeout=5)
REGISTRY = RegistryOptions(retry_seconds=0.2, forget_seconds=1, answer_seconds=0.5)
CLIENT = ClientOptions(
    give_up=LONG, connect_timeout=30, first_backoff=0.02, longest_backoff=0.2, watch_interval=0.1, model_age=LONG
)
# What is freed before such a lease ends is not freed because it ends.
SESSIONS = SessionOptions(lease_seconds=1000)


@dataclass
class Whereabouts:
    """Where the scheduler is, as everybody is told, and which numbers schedulers took; to be changed by tests."""

    address: str = ""
    register: MemoryRegister = field(default_factory=MemoryRegister)

    async def __call__(self) -> str:
        if not self.address:
            raise LookupError("nobody knows")
        return self.address


@dataclass
class Worker:
    """One worker in this process, which computes in a thread."""

    worker_id: str
    role: Role
    server: BaseWorkerServer
    registration: WorkerRegistration
    address: str
    target: StepExecutor | None

    @property
    def executor(self) -> StepExecutor:
        """Of a target."""
        assert self.target is not None, f"{self.worker_id} is a draft"
        return self.target

    @property
    def pages_in_use(self) -> int:
        description = self.server.describe()
        return description.total_pages - description.free_pages


@asynccontextmanager
async def running_worker(
    worker_id: str,
    role: Role,
    resolve: Whereabouts,
    security: ChannelSecurity = OPEN,
    target: VerifyingEngine | None = None,
    draft: Draft | None = None,
    ahead: bool = False,
    **settings: Any,
) -> AsyncIterator[Worker]:
    """`settings` are those of a stand-in, unless there is an engine for the role."""
    server: BaseWorkerServer
    executor = remote = None
    if role is Role.DRAFT:
        server = DraftServer(draft or StandInEngine(**settings), security=security, ahead=ahead)
    else:
        target = target or StandInEngine(**settings)
        remote = RemoteProposer(target.description.vocabulary_size, security)
        executor = target_executor(target, remote)
        server = WorkerServer(executor, security=security)
    address = await server.start()
    registration = WorkerRegistration(worker_id, address, server, resolve, security=security, options=REGISTRATION)
    registration.start()
    try:
        yield Worker(worker_id, role, server, registration, address, executor)
    finally:
        await registration.close()
        await server.stop(1)
        if remote is not None:
            await asyncio.to_thread(remote.close)


@dataclass
class Cell:
    service: SchedulerService
    server: SchedulerServer
    resolve: Whereabouts
    workers: list[Worker]

    @property
    def live_sequences(self) -> int:
        return self.service.core.snapshot().live

    @property
    def pages_in_use(self) -> int:
        """By the scheduler's books and by the workers' own, whichever is more."""
        booked = sum(worker.total_pages - worker.free_pages for worker in self.service.core.snapshot().workers)
        return max(booked, sum(worker.pages_in_use for worker in self.workers))

    async def wait_empty(self) -> None:
        """Waits until scheduler and workers have let go of every sequence and page."""
        await until(lambda: not self.live_sequences)
        async with asyncio.timeout(LONG):
            for worker in self.workers:
                if worker.role is Role.TARGET:  # they keep their streams to drafts
                    await worker.server.wait_empty()
        await until(lambda: not self.pages_in_use)


@asynccontextmanager
async def running_scheduler(
    resolve: Whereabouts,
    config: SchedulerConfig | None = None,
    security: ChannelSecurity = OPEN,
    sessions: SessionOptions = SESSIONS,
    registry: RegistryOptions = REGISTRY,
    observers: Sequence[ServiceObserver] = (),
) -> AsyncIterator[tuple[SchedulerService, SchedulerServer]]:
    epochs = EpochAuthority(resolve.register)
    async with SchedulerService(
        config or SchedulerConfig(policy=Policy.RAGGED),
        scheduler_epoch=await epochs.claim(),
        epochs=epochs,
        link_options=LINKS,
        security=security,
        observers=observers,
    ) as service:
        options = SchedulerServerOptions(sessions=sessions, registry=registry, vllm_model_name=MODEL)
        server = SchedulerServer(service, security=security, options=options)
        resolve.address = await server.start()
        try:
            yield service, server
        finally:
            await server.stop(0.2)


@asynccontextmanager
async def running_cell(
    drafts: int = 1,
    targets: int = 1,
    config: SchedulerConfig | None = None,
    security: ChannelSecurity = OPEN,
    sessions: SessionOptions = SESSIONS,
    registry: RegistryOptions = REGISTRY,
    observers: Sequence[ServiceObserver] = (),
    target: VerifyingEngine | None = None,
    draft: Draft | None = None,
    ahead: bool = False,
    **settings: Any,
) -> AsyncIterator[Cell]:
    """A scheduler and workers that are in use: with these engines if given, else stand-ins with these `settings`.
    `ahead`: drafts compute ahead of verdicts."""
    resolve = Whereabouts()
    async with AsyncExitStack() as stack:
        service, server = await stack.enter_async_context(
            running_scheduler(resolve, config, security, sessions, registry, observers=observers)
        )
        roles = [(Role.DRAFT, index) for index in range(drafts)] + [(Role.TARGET, index) for index in range(targets)]
        workers = [
            await stack.enter_async_context(
                running_worker(f"{role.value}-{index}", role, resolve, security, target, draft, ahead, **settings)
            )
            for role, index in roles
        ]
        await all_in_use(workers)
        yield Cell(service, server, resolve, workers)


async def all_in_use(workers: Sequence[Worker]) -> None:
    async with asyncio.timeout(LONG):
        for worker in workers:
            await worker.registration.wait_in_use()


@dataclass
class Heard:
    """What became of a gateway's sessions and sequences; a spool.services.scheduler_client.remote.RecoveryListener."""

    opened: int = 0
    broken: int = 0
    moved: int = 0

    def session_opened(self) -> None:
        self.opened += 1

    def session_broke(self) -> None:
        self.broken += 1

    def resubmitted(self, sequences: int) -> None:
        self.moved += sequences


def client(
    *cells: Whereabouts,
    security: ChannelSecurity = OPEN,
    options: ClientOptions = CLIENT,
    listener: RecoveryListener | None = None,
) -> SchedulerClient:
    return SchedulerClient(cells, security=security, options=options, gateway_id="gateway", listener=listener)


def prompt_of(index: int) -> tuple[int, ...]:
    return (20 + index % 50, *range(21 + index // 50, 25 + index % 7))


def request_of(index: int, count: int, **fields: Any) -> GenerationRequest:
    return GenerationRequest(prompt_of(index), count, **fields)


async def read(stream: RemoteStream) -> list[int]:
    return [token async for delta in stream for token in delta.tokens]


async def read_some(stream: RemoteStream, count: int) -> list[int]:
    """At least so many of the next tokens."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.extend((await anext(stream)).tokens)
    return tokens


async def check(backend: SchedulerClient, index: int, count: int) -> None:
    """One request from submission to end."""
    stream = await backend.submit(request_of(index, count))
    assert await read(stream) == continuation(prompt_of(index), count)
    assert stream.finish_reason is FinishReason.LENGTH


@dataclass
class SchedulerProcess:
    """A scheduler in a process of its own."""

    process: asyncio.subprocess.Process
    address: str

    def hang(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def scheduler_process() -> AsyncIterator[SchedulerProcess]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.scheduler_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), LONG)
        yield SchedulerProcess(process, json.loads(line)["address"])
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            await process.wait()
