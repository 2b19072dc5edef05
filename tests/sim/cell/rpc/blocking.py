"""What threads without an event loop use of gRPC: bidirectional streams that they send and read, and that block them.

The channel breaks once the server is silent for too long, as by gRPC's own pings.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

import grpc

from tests.sim.cell.rpc.calls import Call, Deserializer, Serializer, rpc_error, unavailable
from tests.sim.cell.virtual_threads import VirtualThread, result_in

if TYPE_CHECKING:
    from tests.sim.cell.process import Process

_DONE = object()


class BlockingChannel:
    """What the generated stubs need of a grpc.Channel."""

    def __init__(self, client: Process, address: str, silence_seconds: float) -> None:
        self._client = client
        self._address = address
        self._silence = silence_seconds
        self._calls: list[BlockingCall] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for call in self._calls:
            call.cancel()

    def stream_stream(
        self, method: str, request_serializer: Serializer, response_deserializer: Deserializer, **_: Any
    ) -> Callable[..., BlockingCall]:
        def begin(requests: Iterator[Any], metadata: Any = ()) -> BlockingCall:
            call = Call(self._client, self._address, method, request_serializer, response_deserializer, None)
            self._calls.append(blocking := BlockingCall(self._client, call, requests, self._silence))
            return blocking

        return begin


class BlockingCall:
    """What the services use of a grpc.Call with replies."""

    def __init__(self, client: Process, call: Call, requests: Iterator[Any], silence_seconds: float) -> None:
        self._call = call
        self._threads = client.network.threads
        self._requests = requests
        self._sender = VirtualThread(self._threads, client)
        self._silence = silence_seconds
        call.open_stream(self._sent())
        client.spawn(self._ping())

    def initial_metadata(self) -> None:
        result_in(self._threads, self._call.admission())

    def is_active(self) -> bool:
        return self._call.active

    def cancel(self) -> None:
        self._call.cancel(rpc_error(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        reply = result_in(self._threads, self._next())
        if reply is _DONE:
            raise StopIteration
        if reply is None:
            self.cancel()
            raise rpc_error(grpc.StatusCode.INTERNAL, "Exception deserializing response!")
        return reply

    async def _next(self) -> Any:
        return await anext(self._call, _DONE)

    async def _sent(self) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()
        while (request := await loop.run_in_executor(self._sender, next, self._requests, _DONE)) is not _DONE:  # type: ignore[arg-type]
            yield request

    async def _ping(self) -> None:
        while self._call.active:
            if self._call.silence() > self._silence:
                await asyncio.sleep(self._silence)
                self._call.cancel(unavailable("ping timeout"))
            await asyncio.sleep(self._silence / 2)
