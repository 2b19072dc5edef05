"""Connections between scheduler and workers that are cut or fall silent under load: the same tokens, each once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import FinishReason, Role
from services.scheduler.server import SchedulerServer, SchedulerServerOptions
from services.scheduler.service import SchedulerService
from services.scheduler.workers.worker_link import LinkOptions, WorkerEndpoint
from services.scheduler_client.remote import SchedulerClient
from services.worker.executor import DraftStepExecutor, TargetStepExecutor
from services.worker.registration import WorkerRegistration
from services.worker.server import WorkerServer
from tests.support.cells import LINKS, REGISTRATION, REGISTRY, Whereabouts, client, prompt_of, read, request_of
from tests.support.stand_in_worker import StandInEngine, continuation
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
    """Every worker is reached through a proxy of its own."""

    service: SchedulerService
    backend: SchedulerClient
    engines: list[StandInEngine]
    workers: list[WorkerServer]
    proxies: list[TcpProxy]

    @property
    def lost(self) -> int:
        return self.service.statistics().workers_lost

    @property
    def all_up(self) -> bool:
        return len(self.service.workers.up) == len(self.proxies)


@asynccontextmanager
async def proxied_cell(roles: tuple[Role, ...] = ROLES, links: LinkOptions = PATIENT) -> AsyncIterator[ProxiedCell]:
    resolve = Whereabouts()
    async with AsyncExitStack() as stack:
        config = SchedulerConfig(policy=Policy.RAGGED)
        service = SchedulerService(config, scheduler_epoch=time.time_ns(), link_options=links)
        await stack.enter_async_context(service)
        server = SchedulerServer(service, options=SchedulerServerOptions(registry=REGISTRY))
        resolve.address = await server.start()
        stack.push_async_callback(server.stop, 0.2)
        cell = ProxiedCell(service, await stack.enter_async_context(client(resolve)), [], [], [])
        for number, role in enumerate(roles):
            engine = StandInEngine(step_seconds=0.005)
            executor = TargetStepExecutor(engine) if role is Role.TARGET else DraftStepExecutor(engine)
            worker = WorkerServer(executor)
            address = await worker.start()
            stack.push_async_callback(worker.stop, 1)
            proxy = await stack.enter_async_context(tcp_proxy(address))
            registration = WorkerRegistration(f"{number}", proxy.address, worker, resolve, options=REGISTRATION)
            await stack.enter_async_context(registration)
            cell.engines.append(engine)
            cell.workers.append(worker)
            cell.proxies.append(proxy)
        await until(lambda: cell.all_up)
        yield cell


async def check_stream(backend: SchedulerClient, index: int, tokens: int = TOKENS) -> None:
    stream = await backend.submit(request_of(index, tokens))
    assert await read(stream) == continuation(prompt_of(index), tokens)
    assert stream.finish_reason is FinishReason.LENGTH


async def load(cell: ProxiedCell, stop: asyncio.Event) -> int:
    """So many streams at once, each checked, until told to stop. Returns how many there were."""
    index = 0

    async def one_after_another() -> None:
        nonlocal index
        while not stop.is_set():
            index += 1
            await check_stream(cell.backend, index)

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


def test_connections_that_are_cut_cost_no_token() -> None:
    async def disturb(cell: ProxiedCell) -> AsyncIterator[None]:
        yield
        for proxy in 2 * cell.proxies:
            lost, connections = cell.lost, proxy.connections
            assert proxy.cut() == 1
            await until(lambda: cell.lost > lost and proxy.connections > connections)  # noqa: B023
            yield
        for proxy in cell.proxies:
            proxy.cut()
        yield

    under_load(disturb)


@pytest.mark.parametrize("role", [Role.DRAFT, Role.TARGET])
def test_connection_that_falls_silent_is_given_up_long_before_a_step_times_out(role: Role) -> None:
    async def disturb(cell: ProxiedCell) -> AsyncIterator[None]:
        yield
        proxy = cell.proxies[ROLES.index(role)]
        proxy.hold()
        await until(lambda: len(cell.service.workers.up) < len(ROLES))
        proxy.release()
        yield

    under_load(disturb)


def test_sequence_that_is_alone_where_connections_break_again_and_again_does_not_fail() -> None:
    async def run() -> None:
        # However busy the machine is, a worker that lives answers in time.
        async with proxied_cell(2 * (Role.TARGET,), replace(PATIENT, silence_timeout=LONG)) as cell:
            plainly = cell.service.has_suspect
            suspected: list[bool] = []

            def has_suspect(endpoint: WorkerEndpoint) -> bool:
                suspected.append(plainly(endpoint))
                return suspected[-1]

            cell.service.has_suspect = has_suspect  # type: ignore[method-assign]
            for engine in cell.engines:
                engine.step_seconds = 0.5
            checking = asyncio.create_task(check_stream(cell.backend, 1, tokens=8))
            await until(lambda: cell.service.statistics().tokens > 0)
            # Sooner than the next token, unless the machine is very busy.
            while suspected.count(True) < 4 and not checking.done():
                lost = cell.lost
                for proxy in cell.proxies:
                    proxy.cut()
                await until(lambda: cell.lost >= lost + 2 and cell.all_up)  # noqa: B023
            await checking
            assert any(suspected)

    asyncio.run(run())
