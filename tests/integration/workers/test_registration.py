"""Workers that come, leave, die, come back changed, or do not fit."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import pytest

from spool.protos import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from spool.scheduler.messages import Role
from spool.services.scheduler.workers.worker_set import RegistryOptions
from tests.support.cells import (
    Cell,
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
)
from tests.support.core_state import check_state
from tests.support.stand_in_worker import continuation
from tests.support.waiting import LONG, until

pytestmark = pytest.mark.slow


def states(cell: Cell) -> dict[str, tuple[int, str]]:
    return {worker.worker_id: (worker.state, worker.reason) for worker in cell.server.status().workers}


async def test_worker_that_is_gone_is_forgotten_and_another_takes_its_name() -> None:
    async with running_cell(drafts=0, targets=0) as cell, client(cell.resolve) as backend:
        async with running_worker("target-0", Role.TARGET, cell.resolve) as first:
            await all_in_use([first])
            await check(backend, 1, 10)
        await until(lambda: not cell.service.workers.up)
        async with running_worker("target-0", Role.TARGET, cell.resolve, pages=50) as second:
            await all_in_use([second])
            (status,) = cell.server.status().workers
            assert (status.address, status.total_pages) == (second.address, 50)
            await check(backend, 1, 10)
            check_state(cell.service.core)
        await until(lambda: not cell.server.status().workers and not cell.service.workers.links)


async def test_another_start_of_a_target_with_another_fingerprint_is_named() -> None:
    """Whatever its name is: what both have computed of one output is not from targets that are alike."""
    async with running_cell(drafts=0, targets=0) as cell, client(cell.resolve) as backend:
        async with running_worker("target-0", Role.TARGET, cell.resolve, step_seconds=0.01):
            stream = await backend.submit(request_of(1, 300))
            tokens = await read_some(stream, 10)
        async with running_worker("target-0", Role.TARGET, cell.resolve, processor="another"):
            tokens += await read(stream)
    assert tokens == continuation(prompt_of(1), 300)
    assert [parts["processor"] for parts in stream.fingerprints.values()] == ["any", "another"]


async def test_two_workers_that_do_not_fit_and_come_at_once_are_not_both_taken() -> None:
    async with (
        running_cell(drafts=0, targets=0) as cell,
        running_worker("one", Role.TARGET, cell.resolve, model_id="one") as one,
        running_worker("other", Role.TARGET, cell.resolve, model_id="other") as other,
    ):
        await until(lambda: one.registration.in_use or other.registration.in_use)
        taken, refused = (one, other) if one.registration.in_use else (other, one)
        # The other has had its answer too, and is taken as soon as nothing stands against it.
        await until(lambda: "differ: model_id" in refused.registration.reason)
        assert cell.service.workers.up == {taken.worker_id}
        assert not refused.registration.in_use
        await taken.registration.leave(LONG)
        await all_in_use([refused])
        assert cell.service.workers.up == {refused.worker_id}


async def test_no_reported_epoch_leaves_later_schedulers_without_one() -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncExitStack())
        cell = await first.enter_async_context(running_cell(drafts=0))
        backend = await stack.enter_async_context(client(cell.resolve))
        channel = await first.enter_async_context(grpc.aio.insecure_channel(cell.resolve.address))
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        description = worker_pb2.WorkerDescription(role=worker_pb2.ROLE_DRAFT, worker_epoch=1)
        request = scheduler_pb2.RegisterRequest(worker_id="ghost", address="127.0.0.1:1", description=description)
        for epoch in (2**64 - 1, 2**63):
            request.highest_scheduler_epoch = epoch
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Register(request, timeout=LONG)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"highest_scheduler_epoch is {epoch}, must be at most {2**63 - 1}" in (caught.value.details() or "")
        request.highest_scheduler_epoch = 2**63 - 1
        reply = await stub.Register(request, timeout=LONG)
        assert reply.scheduler_epoch >= 2**63
        await check(backend, 1, 10)
        await first.aclose()
        # Successors have higher numbers, and speak to workers with them.
        for number in range(2, 5):
            async with (
                running_scheduler(cell.resolve) as (service, _),
                running_worker("target-0", Role.TARGET, cell.resolve) as worker,
            ):
                assert service.workers.epoch > reply.scheduler_epoch
                await all_in_use([worker])
                await check(backend, number, 10)
                # What a successor gave the worker, the worker may report.
                link = service.workers.links["target-0"]
                registered = link.heard
                await until(lambda link=link, registered=registered: link.heard > registered)  # type: ignore[misc]
                assert worker.server.highest_epoch > reply.scheduler_epoch
                assert worker.registration.in_use


async def test_unreachable_worker_is_reported() -> None:
    # Nobody is forgotten between two of its calls, however long these take.
    registry = RegistryOptions(retry_seconds=0.2, forget_seconds=LONG, answer_seconds=0.5)
    async with (
        running_cell(drafts=0, registry=registry) as cell,
        grpc.aio.insecure_channel(cell.resolve.address) as channel,
    ):
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        description = worker_pb2.WorkerDescription(role=worker_pb2.ROLE_DRAFT, worker_epoch=1)
        fields: dict[str, Any] = {"worker_id": "ghost", "address": "127.0.0.1:1", "description": description}
        request = scheduler_pb2.RegisterRequest(**fields)
        reply = await stub.Register(request, timeout=LONG)
        assert reply.state == scheduler_pb2.WORKER_STATE_CONNECTING
        async with asyncio.timeout(LONG):
            while reply.state != scheduler_pb2.WORKER_STATE_UNREACHABLE:
                assert reply.state == scheduler_pb2.WORKER_STATE_CONNECTING
                reply = await stub.Register(request, timeout=LONG)
        assert "worker ghost at 127.0.0.1:1 does not answer" in states(cell)["ghost"][1]
        while_tried_again = await stub.Register(request, timeout=LONG)
        assert while_tried_again.state == scheduler_pb2.WORKER_STATE_UNREACHABLE
        assert reply.scheduler_epoch <= cell.service.workers.epoch
        for changes, message in (
            ({"worker_id": ""}, "worker_id is empty"),
            ({"address": "nowhere"}, "address is 'nowhere', must be host:port"),
            ({"description": worker_pb2.WorkerDescription()}, "role is 0"),
        ):
            wrong = scheduler_pb2.RegisterRequest(**fields | changes)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Register(wrong, timeout=LONG)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert message in (caught.value.details() or "")
