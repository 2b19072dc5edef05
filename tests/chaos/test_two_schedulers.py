"""Two schedulers at once: one stops, another takes its place, and the first goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

from protos import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from scheduler.messages import Role
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
from tests.support.stand_in_worker import MAX_LENGTH, continuation
from tests.support.waiting import LONG, until
from tests.support.watched_engine import WatchedEngine

pytestmark = pytest.mark.slow

STREAMS = 32
TOKENS = 150
"""Of each stream that are compared."""
ENDLESS = MAX_LENGTH - 20
"""Tokens that each stream asks for."""
STEPS = 20
"""Of a target between two events, each with a few tokens for each of 16 streams: far from the end of any."""
WORKERS = (("draft-0", Role.DRAFT), ("draft-1", Role.DRAFT), ("target-0", Role.TARGET), ("target-1", Role.TARGET))


@dataclass
class Replies:
    """The epoch of every step that reached a worker, and the status of the reply."""

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
        """Statuses of the steps with this epoch or a lower one that came after a step with a higher one."""
        first = next((place for place, (spoken, _) in enumerate(self.given) if spoken > epoch), len(self.given))
        return [status for spoken, status in self.given[first:] if spoken <= epoch]


def test_scheduler_that_comes_back_after_its_successor_took_over_gets_refusals_only() -> None:
    """The targets may do so few steps that no stream ends before the first scheduler has come back."""

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
            engines = [WatchedEngine(), WatchedEngine()]
            for engine, worker in zip(engines, workers[-2:], strict=True):
                engine.watch(worker.executor)
                stack.callback(engine.gate.open)

            def allow(steps: int) -> None:
                for engine in engines:
                    engine.gate.close(but_for=steps)

            await all_in_use(workers)
            gateways = [await stack.enter_async_context(client(of_gateways, name=name)) for name in ("a", "b")]
            allow(STEPS)
            streams = [await gateways[index % 2].submit(request_of(index, ENDLESS)) for index in range(STREAMS)]
            texts: list[list[int]] = [[] for _ in streams]
            reading = [
                asyncio.create_task(read_into(text, stream)) for text, stream in zip(texts, streams, strict=True)
            ]
            await until(lambda: sum(map(len, texts)) >= STREAMS)

            first.hang()
            epoch = max(worker.server.highest_epoch for worker in workers)
            resolve.address = second.address
            # Enough for the steps that the first scheduler has begun.
            allow(4)
            await until(lambda: all(worker.server.highest_epoch > epoch for worker in workers))
            # Not before: where only one target is up, it would get all sequences.
            await all_in_use(workers)
            of_gateways.address = second.address
            before = sum(map(len, texts))
            allow(STEPS)
            await until(lambda: sum(map(len, texts)) >= before + STREAMS)
            first.wake()
            status = await status_once_fenced(first.address)
            assert not any(task.done() for task in reading)
            for engine in engines:
                engine.gate.open()
            await until(lambda: all(len(text) >= TOKENS for text in texts))
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*reading)

            assert [text[:TOKENS] for text in texts] == [
                continuation(prompt_of(index), TOKENS) for index in range(STREAMS)
            ]
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


async def status_once_fenced(address: str) -> scheduler_pb2.StatusReply:
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(LONG):
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        while True:
            status: scheduler_pb2.StatusReply = await stub.Status(scheduler_pb2.StatusRequest(), wait_for_ready=True)
            if status.state != scheduler_pb2.SCHEDULER_STATE_SERVING:
                return status
            await asyncio.sleep(0.02)
