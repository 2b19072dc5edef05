"""Schedulers that die, hang or are replaced: streams pause and go on, each token once; workers find the new one."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import pytest

from spool.protos import scheduler_pb2, scheduler_pb2_grpc
from spool.scheduler.messages import Role
from spool.services.backend.interface import BackendUnavailableError, DeadlineExceededError
from spool.services.backend.sequence_stream import SequenceFailedError
from spool.services.scheduler.epochs import EpochAuthority
from spool.services.scheduler_client.cell_link import ClientOptions
from tests.support.cells import (
    Whereabouts,
    all_in_use,
    check,
    client,
    prompt_of,
    read,
    read_some,
    request_of,
    running_cell,
    running_scheduler,
    running_worker,
    scheduler_process,
)
from tests.support.stand_in_worker import continuation
from tests.support.waiting import LONG, until

pytestmark = pytest.mark.slow


async def test_scheduler_that_hangs_is_replaced_and_turned_away_when_it_wakes() -> None:
    resolve = Whereabouts()
    async with (
        scheduler_process() as first,
        scheduler_process() as second,
        running_worker("target-0", Role.TARGET, resolve, step_seconds=0.005) as worker,
        client(resolve) as backend,
    ):
        resolve.address = first.address
        await all_in_use([worker])
        streams = [await backend.submit(request_of(index, 150)) for index in range(10)]
        begun = [await read_some(stream, 5) for stream in streams]
        first.hang()
        resolve.address = second.address
        async with asyncio.timeout(2 * LONG):
            for index, stream in enumerate(streams):
                assert begun[index] + await read(stream) == continuation(prompt_of(index), 150)
        # The old one still believes that it has the worker and the sequences.
        first.wake()
        async with grpc.aio.insecure_channel(first.address) as channel, asyncio.timeout(LONG):
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            status = await stub.Status(scheduler_pb2.StatusRequest())
            while status.state == scheduler_pb2.SCHEDULER_STATE_SERVING:
                await asyncio.sleep(0.05)
                status = await stub.Status(scheduler_pb2.StatusRequest())
            assert status.state == scheduler_pb2.SCHEDULER_STATE_FENCED
            assert "has taken over" in status.reason
        await check(backend, 1, 20)
        await all_in_use([worker])


async def test_client_gives_up_after_a_while_and_says_why() -> None:
    options = ClientOptions(give_up=3, connect_timeout=3, first_backoff=0.02, longest_backoff=0.1)
    async with AsyncExitStack() as stack:
        cell_stack = await stack.enter_async_context(AsyncExitStack())
        cell = await cell_stack.enter_async_context(running_cell(step_seconds=0.02))
        backend = await stack.enter_async_context(client(cell.resolve, options=options))
        stream = await backend.submit(request_of(1, 500))
        model = await backend.model()
        await read_some(stream, 5)
        await cell_stack.aclose()
        with pytest.raises(BackendUnavailableError, match=r"no scheduler was reached for 3 s: scheduler at"):
            await asyncio.wait_for(read(stream), LONG)
        with pytest.raises(BackendUnavailableError, match="no scheduler was reached"):
            await backend.submit(request_of(2, 5))
        with pytest.raises(BackendUnavailableError, match="there is no scheduler"):
            await backend.statuses()
        assert await backend.model() == model
        # It goes on looking, and is well again when one is there.
        async with running_scheduler(cell.resolve), running_worker("t", Role.TARGET, cell.resolve) as worker:
            await all_in_use([worker])
            await until(lambda: backend.connected)
            await check(backend, 3, 10)


async def test_nobody_knows_a_scheduler() -> None:
    options = ClientOptions(give_up=0.2)
    async with client(Whereabouts(), options=options) as backend:
        with pytest.raises(BackendUnavailableError, match="LookupError: nobody knows"):
            await backend.submit(request_of(1, 5))
    with pytest.raises(BackendUnavailableError, match="is closed"):
        await backend.submit(request_of(1, 5))
    async with client(Whereabouts()) as backend:
        with pytest.raises(DeadlineExceededError):
            await backend.submit(request_of(1, 5, deadline_seconds=0.1))


async def test_sequence_that_no_session_survives_is_given_up() -> None:
    options = ClientOptions(max_fruitless_submissions=3, first_backoff=0.01, longest_backoff=0.02)
    resolve = Whereabouts()
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(client(resolve, options=options))

        async def first_tokens() -> None:
            await anext(await backend.submit(request_of(1, 5)))

        asked = asyncio.create_task(first_tokens())
        async with asyncio.timeout(LONG):
            while not asked.done():
                # A scheduler without workers that dies as soon as it has the sequence.
                async with running_scheduler(resolve) as (service, _):
                    await until(lambda: service.core.snapshot().live > 0 or asked.done())
        with pytest.raises(SequenceFailedError, match="3 sessions broke without a token for the sequence"):
            await asked


async def test_schedulers_that_are_replaced_are_not_held_against_a_sequence() -> None:
    options = ClientOptions(max_fruitless_submissions=3, first_backoff=0.01, longest_backoff=0.02)
    resolve = Whereabouts()
    async with client(resolve, options=options) as backend:
        asked = asyncio.create_task(check(backend, 1, 5))
        for _ in range(5):
            async with running_scheduler(resolve) as (service, _server):
                await until(lambda service=service: service.core.snapshot().live > 0)  # type: ignore[misc]
                await EpochAuthority(resolve.register).claim()
                await service.hear_of_epoch(service.workers.epoch + 1)
                assert service.fenced
                await until(lambda: not backend.connected)
        assert not asked.done()
        async with running_scheduler(resolve), running_worker("target-0", Role.TARGET, resolve):
            await asyncio.wait_for(asked, LONG)
