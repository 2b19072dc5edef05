"""The x-request-id of gRPC calls."""

from __future__ import annotations

import grpc.aio

from services.request_ids import REQUEST_ID, TRACEPARENT, begin_request, given_in


async def begin_call(context: grpc.aio.ServicerContext) -> None:
    """What the task does from here on is for the call's request; its id goes back in the initial metadata."""
    metadata = context.invocation_metadata()
    request_id = begin_request(given_in(metadata), given_in(metadata, TRACEPARENT))
    await context.send_initial_metadata(((REQUEST_ID, request_id),))
