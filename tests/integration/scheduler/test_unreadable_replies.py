"""Replies that arrive and are no messages: whoever reads one loses a connection, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from protos import worker_pb2

DESCRIBE, STEPS = "/spool.v1.Worker/Describe", "/spool.v1.Worker/Steps"
REGISTER, SESSION = "/spool.v1.Scheduler/Register", "/spool.v1.Scheduler/Session"


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
