"""Replies that arrive and are no messages: whoever reads one loses a connection, and nothing else."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError

from protos import worker_pb2
from services.rpc.call_guards import guards
from services.rpc.channel_security import ChannelSecurity
from tests.support.cells import all_in_use, check, client, running_cell
from tests.support.waiting import until

DESCRIBE, STEPS = "/spool.v1.Worker/Describe", "/spool.v1.Worker/Steps"
REGISTER, SESSION = "/spool.v1.Scheduler/Register", "/spool.v1.Scheduler/Session"


class Garbling(grpc.aio.ServerInterceptor):
    """Cuts the replies at these places of all replies to a method of one server."""

    def __init__(self, places: Mapping[str, set[int]], cut: Counter[str]) -> None:
        self._places = places
        self._cut = cut
        self._replies: Counter[str] = Counter()

    async def intercept_service(
        self, continuation: Callable[..., Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or method not in self._places:
            return handler
        serialize = handler.response_serializer

        def garbled(reply: Any) -> bytes:
            self._replies[method] += 1
            if self._replies[method] - 1 not in self._places[method]:
                return serialize(reply)
            self._cut[method] += 1
            return b"\xff"

        return handler._replace(response_serializer=garbled)


@pytest.mark.parametrize(
    "places",
    [
        {STEPS: {5}},
        {STEPS: {0}},
        {STEPS: {5}, DESCRIBE: {1}},
        {DESCRIBE: {0}},
        {REGISTER: {1}},
        {SESSION: {0}},
        {SESSION: {2}},
    ],
)
def test_everything_goes_on_after_a_reply_that_cannot_be_read(
    places: dict[str, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: Counter[str] = Counter()

    def garbling(security: ChannelSecurity) -> list[grpc.aio.ServerInterceptor]:
        return [Garbling(places, cut), *guards(security)]

    monkeypatch.setattr("services.worker.server.guards", garbling)
    monkeypatch.setattr("services.scheduler.server.guards", garbling)

    async def run() -> None:
        async with running_cell() as cell, client(cell.resolve) as backend:
            await asyncio.gather(*(check(backend, index, 30) for index in range(8)))
            await until(lambda: cut.keys() == places.keys())
            await asyncio.gather(*(check(backend, index, 30) for index in range(8)))
            await all_in_use(cell.workers)
            assert cell.service.closed_because is None
            backend.check_health()
            for worker in cell.workers:
                worker.registration.check_health()
            await until(lambda: cell.service.workers.up == {worker.worker_id for worker in cell.workers})

    asyncio.run(run())


def test_grpc_does_with_unreadable_messages_what_the_simulation_does() -> None:
    """A client gets None in their place, and the stream goes on; whoever reads a stream of requests, DecodeError."""
    raised: list[type[Exception]] = []

    async def steps(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            async for request in requests:
                yield b"\xff" if request.step_id == 1 else worker_pb2.StepReply(step_id=request.step_id)
        except DecodeError as error:
            raised.append(type(error))

    async def describe(request: Any, context: grpc.aio.ServicerContext) -> bytes:
        return b"\xff"

    def as_bytes(message: Any) -> bytes:
        return message if isinstance(message, bytes) else message.SerializeToString()

    class Server(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> Any:
            if details.method == STEPS:
                return grpc.stream_stream_rpc_method_handler(steps, worker_pb2.StepRequest.FromString, as_bytes)
            return grpc.unary_unary_rpc_method_handler(describe, worker_pb2.DescribeRequest.FromString)

    async def run() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Server(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                describe_call = channel.unary_unary(DESCRIBE, as_bytes, worker_pb2.WorkerDescription.FromString)
                assert await describe_call(worker_pb2.DescribeRequest()) is None
                call = channel.stream_stream(STEPS, as_bytes, worker_pb2.StepReply.FromString)
                requests = [worker_pb2.StepRequest(step_id=step_id) for step_id in range(3)]
                replies = [reply async for reply in call([*requests, b"\xff", *requests])]
                assert [reply and reply.step_id for reply in replies] == [0, None, 2]
        finally:
            await server.stop(None)

    asyncio.run(run())
    assert raised == [DecodeError]
