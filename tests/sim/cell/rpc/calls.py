"""gRPC without a network: calls between simulated processes, over connections that can be slow, silent or cut.

Covers what the services use of grpc.aio: unary calls, streams of replies and bidirectional ones, deadlines,
cancellation, and the errors that a broken connection ends them with. Messages travel as bytes. What a server cannot
read ends the call as the services' own code says. In the place of a reply that cannot be read a client gets None, as
from grpc.aio.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from tests.sim.cell.rpc.wire import read_reply
from tests.sim.cell.virtual_time import VirtualLoop

if TYPE_CHECKING:
    from tests.sim.cell.process import Process
    from tests.sim.cell.rpc.network import Listener

_METADATA = grpc.aio.Metadata()

Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]
Codec = tuple[Serializer, Deserializer]
"""How a client writes requests and reads replies of a method."""
UNNOTICED = (0.001, 0.05, 0.5)
"""Seconds that a client may take to notice that a connection is gone."""


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, _METADATA, _METADATA, details=details)


def unavailable(details: str) -> grpc.aio.AioRpcError:
    return rpc_error(grpc.StatusCode.UNAVAILABLE, details)


class Channel:
    """What the generated stubs need of a grpc.aio channel."""

    def __init__(self, client: Process, address: str) -> None:
        self._client = client
        self._address = address
        self._calls: list[StreamCall] = []

    def unary_unary(
        self, method: str, request_serializer: Serializer, response_deserializer: Deserializer, **_: Any
    ) -> Callable[..., Coroutine[Any, Any, Any]]:
        def call(
            request: Any, timeout: float | None = None, wait_for_ready: bool = False, metadata: Any = ()
        ) -> Coroutine[Any, Any, Any]:
            codec = (request_serializer, response_deserializer)
            return self._ask(method, codec, request, timeout, wait_for_ready)

        return call

    async def _ask(self, method: str, codec: Codec, request: Any, seconds: float | None, wait_for_ready: bool) -> Any:
        serialize, deserialize = codec
        client, network = self._client, self._client.network
        call = UnaryCall(client, self._address, method, request)
        if client.alive:
            network.tap.wrote(call, True, request)
        raw = network.wire.carry(request, serialize)
        reply = read_reply(await _unary(call, raw, seconds, wait_for_ready), deserialize)
        if reply is not None and client.alive:
            network.tap.read(call, True, reply)
        return reply

    def stream_stream(
        self, method: str, request_serializer: Serializer, response_deserializer: Deserializer, **_: Any
    ) -> Callable[..., StreamCall]:
        def call(requests: Any, timeout: float | None = None, metadata: Any = ()) -> StreamCall:
            codec = (request_serializer, response_deserializer)
            stream = StreamCall(self._client, self._address, method, codec, requests, timeout)
            self._calls.append(stream)
            return stream

        return call

    def unary_stream(
        self, method: str, request_serializer: Serializer, response_deserializer: Deserializer, **_: Any
    ) -> Callable[..., StreamCall]:
        def call(request: Any, timeout: float | None = None, metadata: Any = ()) -> StreamCall:
            codec = (request_serializer, response_deserializer)
            stream = ReplyStreamCall(self._client, self._address, method, codec, [request], timeout)
            self._calls.append(stream)
            return stream

        return call

    async def close(self, _grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()


@dataclass(eq=False, slots=True)
class UnaryCall:
    """A call with one request and one reply."""

    client: Process
    address: str
    method: str
    request: Any
    server: Process | None = None


async def _unary(call: UnaryCall, request: bytes, seconds: float | None, wait_for_ready: bool) -> bytes:
    client, address, method = call.client, call.address, call.method
    if not client.alive:
        raise unavailable(f"{client.name} is dead")
    network, loop = client.network, client.network.loop
    answer: asyncio.Future[bytes] = loop.create_future()
    handler: asyncio.Task[None] | None = None
    end = None if seconds is None else loop.now + seconds

    def settle(result: Any) -> None:
        if answer.done() or not client.alive:
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    async def serve(listener: Listener) -> None:
        call.server = listener.process
        try:
            served = listener.methods[method]
            network.tap.read(call, False, call.request)
            reply = await served.unary_unary(request, ServerContext(None, end))
            if listener.process.alive:
                network.tap.wrote(call, False, reply)
            result: Any = network.wire.carry(reply, served.response_serializer)
        except _AbortedError as aborted:
            result = rpc_error(aborted.code, aborted.details)
        except Exception as error:
            if listener.process.alive:
                network.handler_errors.append(f"{method}: {error!r}")
            result = rpc_error(grpc.StatusCode.UNKNOWN, repr(error))
        finally:
            if listener.process.alive:
                network.tap.served(call)
        if listener.process.alive:
            loop.post(network.arrival(listener.process, client.name), settle, result)

    def arrive() -> None:
        nonlocal handler
        listener = network.listeners.get(address)
        if listener is not None and listener.process.alive:
            handler = listener.process.spawn(serve(listener))
        elif wait_for_ready:
            if not answer.done():
                loop.post(loop.now + 0.1, arrive)
        else:
            settle(unavailable(f"nobody listens at {address}"))

    server = network.listeners.get(address)
    far_name = server.process.name if server is not None else address
    loop.post(network.arrival(client, far_name), arrive)
    expiry = None
    if seconds is not None:
        expiry = loop.call_later(seconds, settle, rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
    try:
        return await answer
    finally:
        if expiry is not None:
            expiry.cancel()
        if handler is not None and not handler.done() and client.alive:
            # A caller that has given up, as grpc.aio tells a server.
            loop.post(network.arrival(client, far_name), handler.cancel)


class _AbortedError(Exception):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class ServerContext:
    """What the services use of a grpc.aio.ServicerContext."""

    def __init__(self, call: StreamCall | None, end: float | None = None) -> None:
        self._call = call
        self._end = end

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise _AbortedError(code, details)

    async def send_initial_metadata(self, _metadata: Any) -> None:
        return

    async def write(self, message: Any) -> None:
        assert self._call is not None
        self._call.reply(message)

    def time_remaining(self) -> float | None:
        return None if self._end is None else self._end - asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class _End:
    error: grpc.aio.AioRpcError | None = None


class _Inbox:
    __slots__ = ("_items", "_loop", "_waiter")

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        """The end, once there, stays."""
        items = self._items
        while not items:
            self._waiter = self._loop.create_future()
            await self._waiter
        return items[0] if isinstance(items[0], _End) else items.popleft()


class StreamCall:
    """A bidirectional stream: the client's end of it, and the task that serves it at the other."""

    def __init__(
        self,
        client: Process,
        address: str,
        method: str,
        codec: Codec,
        requests: Any,
        timeout: float | None,
    ) -> None:
        network = client.network
        self.client = client
        self.server: Process | None = None
        self.address = address
        self.method = method
        self._serialize, self._deserialize = codec
        self._served: Any = None
        self._steps = method.endswith("/Steps")
        self._moves_kv = method.endswith("/ExportKv")
        self._network = network
        self._loop = network.loop
        self._replies = _Inbox(self._loop)
        self._requests = _Inbox(self._loop)
        self._handler: asyncio.Task[Any] | None = None
        self._last_up = self._last_down = 0.0
        self._ended = False
        self._expiry = None if timeout is None else self._loop.call_later(timeout, self._expire)
        listener = network.listeners.get(address)
        self._far_name = listener.process.name if listener is not None else address
        if client.alive:
            client.calls[self] = None
            self._up(self._open, straight=True)
            self._pump = client.spawn(self._send(requests))
        else:
            # What a process begins on its way out must not keep it.
            self._finish(unavailable(f"{client.name} is dead"))

    def joins(self, other: Process) -> bool:
        return other in (self.client, self.server)

    # The client's end.

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        item = await self._replies.get()
        if isinstance(item, _End):
            if item.error is not None:
                raise item.error
            raise StopAsyncIteration
        reply = read_reply(item, self._deserialize)
        if reply is not None and self.client.alive:
            self._network.tap.read(self, True, reply)
        return reply

    def cancel(self) -> None:
        if not self._ended and self.client.alive:
            self._up(self._stop_handler, straight=True)
        self._finish(None)

    async def _send(self, requests: Any) -> None:
        if hasattr(requests, "__aiter__"):
            try:
                async for request in requests:
                    self._send_one(request)
            finally:
                await requests.aclose()
        else:
            for request in requests:
                self._send_one(request)
        self._up(self._requests.put, _End(), straight=True)

    def _send_one(self, request: Any) -> None:
        if self.client.alive:
            self._network.tap.wrote(self, True, request)
        self._up(self._requests.put, self._network.wire.carry(request, self._serialize))

    def _expire(self) -> None:
        self.cancel()
        self._replies.put(_End(rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")))

    def _finish(self, error: grpc.aio.AioRpcError | None) -> None:
        """The client knows that the call is over."""
        if self._ended:
            return
        self._ended = True
        self.client.calls.pop(self, None)
        if self._expiry is not None:
            self._expiry.cancel()
        if self.client.alive:
            self._pump.cancel()
        self._replies.put(_End(error))

    # The server's end.

    def _open(self) -> None:
        listener = self._network.listeners.get(self.address)
        if listener is None or not listener.process.alive:
            self._finish(unavailable(f"nobody listens at {self.address}"))
            return
        self.server = listener.process
        listener.process.calls[self] = None
        self._handler = listener.process.spawn(self._serve(listener))

    async def _serve(self, listener: Listener) -> None:
        context = ServerContext(self)
        end = _End()
        try:
            self._served = listener.methods[self.method]
            result = await self._begin(context)
            if hasattr(result, "__aiter__"):
                try:
                    async for reply in result:
                        self.reply(reply)
                finally:
                    await result.aclose()
            else:
                await result
        except _AbortedError as aborted:
            end = _End(rpc_error(aborted.code, aborted.details))
        except Exception as error:
            if listener.process.alive:
                self._network.handler_errors.append(f"{self.method}: {error!r}")
            end = _End(rpc_error(grpc.StatusCode.UNKNOWN, repr(error)))
        finally:
            listener.process.calls.pop(self, None)
            if listener.process.alive:
                self._network.tap.served(self)
        self._down(self._end, end, straight=True)

    async def _begin(self, context: ServerContext) -> Any:
        """What the handler returns: replies to come, or something to wait for."""
        return self._served.stream_stream(self._incoming(), context)

    async def _incoming(self) -> AsyncIterator[Any]:
        """Raises DecodeError where a message cannot be read."""
        while not isinstance(item := await self._requests.get(), _End):
            request = self._served.request_deserializer(item)
            if self.server is not None and self.server.alive:
                self._network.tap.read(self, False, request)
            yield request

    def reply(self, message: Any) -> None:
        if self.server is not None and self.server.alive:
            self._network.tap.wrote(self, False, message)
        sent = self._network.damage(message) if self._moves_kv else message
        self._down(self._take, self._network.wire.carry(sent, self._served.response_serializer))

    def _take(self, raw: bytes) -> None:
        if not self._ended:
            self._replies.put(raw)

    def _end(self, end: _End) -> None:
        self._finish(end.error)

    def _stop_handler(self) -> None:
        if self._handler is not None:
            self._handler.cancel()

    # Between them.

    def break_off(self, reason: str) -> None:
        """The connection is gone. Each end notices in its own time; the server may still read what was on the way."""
        rng, loop = self._network.rng, self._loop
        loop.post(loop.now + rng.choice(UNNOTICED), self._finish, unavailable(reason))
        loop.post(loop.now + rng.choice((0.001, 0.05, 2.0)), self._stop_handler)

    def _up(self, action: Callable[..., None], *args: Any, straight: bool = False) -> None:
        if not self.client.alive:
            return
        far = self.server.name if self.server is not None else self._far_name
        at = max(self._network.arrival(self.client, far), self._last_up)
        kind = "" if straight or not self._steps else self._network.mischief(self.client.name, far)
        if kind == "late":
            self._loop.post(at + 0.05 * self._network.rng.random(), self._arrive_up, action, *args)
            return
        self._last_up = at
        self._loop.post(at, self._arrive_up, action, *args)
        if kind == "twice":
            self._loop.post(at + 0.05 * self._network.rng.random(), self._arrive_up, action, *args)
        elif self._steps and not straight and self._network.wire.repeats():
            self._loop.post(at, self._arrive_up, action, *args)

    def _arrive_up(self, action: Callable[..., None], *args: Any) -> None:
        if self.server is None or self.server.alive:
            action(*args)

    def _down(self, action: Callable[..., None], *args: Any, straight: bool = False) -> None:
        server = self.server
        if server is None or not server.alive:
            return
        at = max(self._network.arrival(server, self.client.name), self._last_down)
        kind = "" if straight or not self._steps else self._network.mischief(server.name, self.client.name)
        if kind == "late":
            self._loop.post(at + 0.05 * self._network.rng.random(), self._arrive_down, action, *args)
            return
        self._last_down = at
        self._loop.post(at, self._arrive_down, action, *args)
        if kind == "twice":
            self._loop.post(at + 0.05 * self._network.rng.random(), self._arrive_down, action, *args)

    def _arrive_down(self, action: Callable[..., None], *args: Any) -> None:
        if self.client.alive:
            action(*args)


class ReplyStreamCall(StreamCall):
    """One request, and a stream of replies."""

    async def _begin(self, context: ServerContext) -> Any:
        return self._served.unary_stream(await self._requests.get(), context)
