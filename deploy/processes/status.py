"""What the scheduler of a cell without Ray says of itself and its workers."""

from __future__ import annotations

import logging
from typing import Any

import grpc

from deploy.assembly.plain_message import plain_message
from protos import scheduler_pb2, scheduler_pb2_grpc
from services.rpc.channel_security import ChannelSecurity

_CALL_SECONDS = 10.0


async def scheduler_status(address: str, security: ChannelSecurity) -> dict[str, Any] | None:
    """None while it does not answer."""
    async with security.open_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        request = scheduler_pb2.StatusRequest()
        try:
            reply = await stub.Status(request, timeout=_CALL_SECONDS, metadata=security.metadata)
        except grpc.aio.AioRpcError:
            logging.getLogger(__name__).debug("the scheduler did not answer", exc_info=True)
            return None
    return plain_message(reply) | {"autoscaling": None}
