"""Two schedulers at once: one stops, another takes its place, and the first goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

from protos import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from scheduler.messages import FinishReason, Role
from services.scheduler_client.remote_stream import RemoteStream
from tests.support.cells import (
    Whereabouts,
    Worker,
    all_in_use,
    client,
    prompt_of,
    request_of,
    running_worker,
    scheduler_process,
)
from tests.support.stand_in_worker import continuation
from tests.support.waiting import LONG, until
from tests.support.watched_engine import WatchedEngine

pytestmark = pytest.mark.slow

STREAMS = 32
TOKENS = 300
WORKERS = (("draft-0", Role.DRAFT), ("draft-1", Role.DRAFT), ("target-0", Role.TARGET), ("target-1", Role.TARGET))


@dataclass
class Replies:
    """Every step that reached a worker, and what became of it."""

    given: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, worker: Worker) -> Replies:
        replies, execute = cls(), worker.executor.execute

        def recorded(request: worker_pb2.StepRequest, *arguments: Any) -> worker_pb2.StepReply:
            reply = execute(request, *arguments)
            replies.given.append((request.scheduler_epoch, reply.status))
            return reply

        worker.executor.execute = recorded  # type: ignore[method-assign]
        return replies

    def after(self, epoch: int) -> list[int]:
        """Of steps with this epoch or a lower one, what they were answered since a higher one has spoken."""
        first = next((place for place, (spoken, _) in enumerate(self.given) if spoken > epoch), len(self.given))
        return [status for spoken, status in self.given[first:] if spoken <= epoch]


def test_scheduler_that_comes_back_beside_its_successor_gets_refusals_only() -> None:
    """One target computes next to nothing until the first scheduler has gone: its streams are open all that time. The
    other one may do so many steps that there are tokens, and so few that its streams do not end either."""

    async def run() -> None:
        resolve, of_gateways = Whereabouts(), Whereabouts()
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(scheduler_process())
            second = await stack.enter_async_context(scheduler_process())
            resolve.address = of_gateways.address = first.address
            workers = [
                await stack.enter_async_context(running_worker(name, role, resolve, step_seconds=0.005))
                for name, role in WORKERS
            ]
            replies = [Replies.of(worker) for worker in workers]
            free, held = WatchedEngine(), WatchedEngine()
            for engine, worker in zip((free, held), workers[-2:], strict=True):
                engine.watch(worker.executor)
                stack.callback(engine.gate.open)
            await all_in_use(workers)
            gateways = [await stack.enter_async_context(client(of_gateways, name=name)) for name in ("a", "b")]
            held.gate.close(but_for=2)
            free.gate.close(but_for=60)
            streams = [await gateways[index % 2].submit(request_of(index, TOKENS)) for index in range(STREAMS)]
            texts: list[list[int]] = [[] for _ in streams]
            reading = [
                asyncio.create_task(read_into(text, stream)) for text, stream in zip(texts, streams, strict=True)
            ]
            await until(lambda: sum(map(len, texts)) >= STREAMS)

            first.hang()
            epoch = max(worker.server.highest_epoch for worker in workers)
            resolve.address = second.address
            # Enough for the steps that the first scheduler has begun.
            held.gate.close(but_for=4)
            free.gate.close(but_for=8)
            await until(lambda: all(worker.server.highest_epoch > epoch for worker in workers))
            # Not before: where one target only is up, it would get all sequences.
            await all_in_use(workers)
            of_gateways.address = second.address
            before = sum(map(len, texts))
            free.gate.close(but_for=60)
            await until(lambda: sum(map(len, texts)) >= before + STREAMS)
            first.wake()
            status = await fenced(first.address)
            assert not all(task.done() for task in reading)
            held.gate.open()
            free.gate.open()
            async with asyncio.timeout(LONG):
                await asyncio.gather(*reading)

            assert texts == [continuation(prompt_of(index), TOKENS) for index in range(STREAMS)]
            assert {stream.finish_reason for stream in streams} == {FinishReason.LENGTH}
            assert status.state == scheduler_pb2.SCHEDULER_STATE_FENCED
            refused = [status for one in replies for status in one.after(epoch)]
            assert refused, "the first scheduler spoke to no worker any more"
            assert set(refused) == {worker_pb2.STEP_STATUS_FENCED}
            for worker in workers:
                await asyncio.wait_for(worker.server.wait_empty(), LONG)

    asyncio.run(run())


async def read_into(text: list[int], stream: RemoteStream) -> None:
    async for delta in stream:
        text.extend(delta.tokens)


async def fenced(address: str) -> scheduler_pb2.StatusReply:
    """The status of a scheduler once it does not serve any more."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(LONG):
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        while True:
            status: scheduler_pb2.StatusReply = await stub.Status(scheduler_pb2.StatusRequest(), wait_for_ready=True)
            if status.state != scheduler_pb2.SCHEDULER_STATE_SERVING:
                return status
            await asyncio.sleep(0.02)
