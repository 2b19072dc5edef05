"""Connections between scheduler and workers that fall silent under load: the same tokens, each once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from scheduler.messages import Role
from services.scheduler.service import SchedulerService
from services.scheduler_client.remote import SchedulerClient
from services.worker.executor import DraftStepExecutor, TargetStepExecutor
from services.worker.registration import WorkerRegistration
from services.worker.server import WorkerServer
from tests.support.cells import (
    LINKS,
    REGISTRATION,
    Whereabouts,
    check,
    client,
    running_cell,
    running_scheduler,
)
from tests.support.stand_in_worker import StandInEngine
from tests.support.tcp_proxy import TcpProxy, tcp_proxy
from tests.support.waiting import LONG, until

pytestmark = pytest.mark.slow

STREAMS = 32
TOKENS = 150
ROLES = (Role.DRAFT, Role.DRAFT, Role.TARGET, Role.TARGET)
# A test that waits for a step to time out fails.
PATIENT = replace(LINKS, step_timeout=10 * LONG)


@dataclass
class ProxiedCell:
    """The scheduler reaches every worker through a proxy of its own."""

    service: SchedulerService
    backend: SchedulerClient
    workers: list[WorkerServer]
    proxies: list[TcpProxy]

    @property
    def all_up(self) -> bool:
        return len(self.service.workers.up) == len(self.proxies)


@asynccontextmanager
async def proxied_cell() -> AsyncIterator[ProxiedCell]:
    resolve = Whereabouts()
    async with AsyncExitStack() as stack:
        service, _ = await stack.enter_async_context(running_scheduler(resolve, links=PATIENT))
        cell = ProxiedCell(service, await stack.enter_async_context(client(resolve)), [], [])
        for number, role in enumerate(ROLES):
            engine = StandInEngine(step_seconds=0.005)
            executor = TargetStepExecutor(engine) if role is Role.TARGET else DraftStepExecutor(engine)
            worker = WorkerServer(executor)
            address = await worker.start()
            stack.push_async_callback(worker.stop, 1)
            proxy = await stack.enter_async_context(tcp_proxy(address))
            registration = WorkerRegistration(f"{number}", proxy.address, worker, resolve, options=REGISTRATION)
            await stack.enter_async_context(registration)
            cell.workers.append(worker)
            cell.proxies.append(proxy)
        await until(lambda: cell.all_up)
        yield cell


async def load(cell: ProxiedCell, stop: asyncio.Event) -> int:
    """STREAMS checked streams at once, until `stop` is set. Returns how many streams there were."""
    index = 0

    async def one_after_another() -> None:
        nonlocal index
        while not stop.is_set():
            index += 1
            await check(cell.backend, index, TOKENS)

    async with asyncio.timeout(2 * LONG), asyncio.TaskGroup() as group:
        for _ in range(STREAMS):
            group.create_task(one_after_another())
    return index


def under_load(disturb: Callable[[ProxiedCell], AsyncIterator[None]]) -> None:
    """Runs each step of `disturb` when every worker has been in use and tokens have come since the last one."""

    async def run() -> None:
        async with proxied_cell() as cell:
            stop = asyncio.Event()
            loading = asyncio.create_task(load(cell, stop))
            try:
                async for _ in disturb(cell):
                    tokens = cell.service.statistics().tokens
                    await until(lambda: cell.all_up or loading.done())
                    await until(lambda: cell.service.statistics().tokens > tokens + 20 * STREAMS or loading.done())  # noqa: B023
                    assert not loading.done(), loading.result()
            finally:
                stop.set()
                finished = await loading
            assert finished >= STREAMS
            for worker in cell.workers:
                await asyncio.wait_for(worker.wait_empty(), LONG)

    asyncio.run(run())


def test_connections_that_fall_silent_are_given_up_long_before_a_step_times_out() -> None:
    async def disturb(cell: ProxiedCell) -> AsyncIterator[None]:
        yield
        for role in (Role.DRAFT, Role.TARGET):
            proxy = cell.proxies[ROLES.index(role)]
            proxy.hold()
            await until(lambda: len(cell.service.workers.up) < len(ROLES))
            proxy.release()
            yield

    under_load(disturb)


def test_a_step_may_take_longer_than_a_worker_may_be_silent() -> None:
    async def run() -> None:
        seconds = 3.5 * LINKS.silence_timeout
        async with running_cell(drafts=0, step_seconds=seconds) as cell, client(cell.resolve) as backend:
            await check(backend, 1, 3)
            assert cell.service.statistics().workers_lost == 0

    asyncio.run(run())
