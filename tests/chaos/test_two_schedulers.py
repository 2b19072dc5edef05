"""Two schedulers at once: one stops, another takes its place, and the first goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from protos import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from scheduler.messages import FinishReason, Role
from tests.stand_in_worker import continuation
from tests.support.cells import (
    Whereabouts,
    Worker,
    all_in_use,
    client,
    prompt_of,
    read,
    read_some,
    request_of,
    running_worker,
    scheduler_process,
)
from tests.support.waiting import LONG, until

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
    async def run() -> None:
        resolve = Whereabouts()
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(scheduler_process())
            second = await stack.enter_async_context(scheduler_process())
            resolve.address = first.address
            workers = [
                await stack.enter_async_context(running_worker(name, role, resolve, step_seconds=0.005))
                for name, role in WORKERS
            ]
            replies = [Replies.of(worker) for worker in workers]
            await all_in_use(workers)
            gateways = [await stack.enter_async_context(client(resolve, name=name)) for name in ("a", "b")]
            streams = [await gateways[index % 2].submit(request_of(index, TOKENS)) for index in range(STREAMS)]
            begun = [await read_some(stream, 10) for stream in streams]

            first.hang()
            epoch = max(worker.server.highest_epoch for worker in workers)
            resolve.address = second.address
            await until(lambda: all(worker.server.highest_epoch > epoch for worker in workers))
            begun = [tokens + await read_some(stream, 1) for tokens, stream in zip(begun, streams, strict=True)]
            assert sum(map(len, begun)) < STREAMS * TOKENS, "all was over before the first scheduler went on"
            first.wake()
            status = await fenced(first.address)
            async with asyncio.timeout(LONG):
                texts = [tokens + await read(stream) for tokens, stream in zip(begun, streams, strict=True)]

            assert texts == [continuation(prompt_of(index), TOKENS) for index in range(STREAMS)]
            assert {stream.finish_reason for stream in streams} == {FinishReason.LENGTH}
            assert status.state == scheduler_pb2.SCHEDULER_STATE_FENCED
            refused = [status for one in replies for status in one.after(epoch)]
            assert refused, "the first scheduler spoke to no worker any more"
            assert set(refused) == {worker_pb2.STEP_STATUS_FENCED}
            for worker in workers:
                await asyncio.wait_for(worker.server.wait_empty(), LONG)

    asyncio.run(run())


async def fenced(address: str) -> scheduler_pb2.StatusReply:
    """The status of a scheduler once it does not serve any more."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(LONG):
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        while True:
            status: scheduler_pb2.StatusReply = await stub.Status(scheduler_pb2.StatusRequest(), wait_for_ready=True)
            if status.state != scheduler_pb2.SCHEDULER_STATE_SERVING:
                return status
            await asyncio.sleep(0.02)
