"""What happens before every gRPC method: the request gets its id, and the client shows its key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import grpc.aio

from spool.services.gateway.api_keys import ApiKeys
from spool.services.gateway.errors import RequestError
from spool.services.gateway.grpc.errors import abort
from spool.services.gateway.metrics import GatewayMetrics
from spool.services.observability.request_ids import REQUEST_ID, TRACEPARENT, begin_request, given_in, note_key
from spool.services.rpc.call_guards import CallerGuard, Refusal


async def begin_call(context: grpc.aio.ServicerContext) -> None:
    """From here on the task works for the call's request, whose id goes back in the initial metadata."""
    metadata = context.invocation_metadata()
    request_id = begin_request(given_in(metadata), given_in(metadata, TRACEPARENT))
    await context.send_initial_metadata(((REQUEST_ID, request_id),))


def key_guard(keys: ApiKeys, metrics: GatewayMetrics) -> CallerGuard:
    """Lets calls pass that carry a key, and notes the key's name for the call."""

    def refusal(authorization: Sequence[bytes]) -> Refusal | None:
        try:
            note_key(*keys.check(*authorization))
        except RequestError as error:
            metrics.failed(error.kind)
            return _refusal(error)
        return None

    return CallerGuard(refusal)


def _refusal(error: RequestError) -> Refusal:
    async def refuse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await begin_call(context)
        await abort(context, error)

    return refuse
