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
from google.protobuf.message import DecodeError

from tests.sim.cell.virtual_time import VirtualLoop

if TYPE_CHECKING:
    from tests.sim.cell.process import Process
    from tests.sim.cell.rpc.network import Listener

_METADATA = grpc.aio.Metadata()

Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]
UNNOTICED = (0.001, 0.05, 0.5)
"""Seconds that a client may take to notice that a connection is gone."""
MISCHIEF = {"Steps": ("twice", "late"), "Propose": ("twice", "late", "lost", "stale")}
"""What may happen to messages of streams, beyond what gRPC allows. A `stale` one comes once more after later ones."""
_READY_SECONDS = 0.1
"""After which a call that waits for its server tries again."""


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, _METADATA, _METADATA, details=details)


def unavailable(details: str) -> grpc.aio.AioRpcError:
    return rpc_error(grpc.StatusCode.UNAVAILABLE, details)


class Channel:
    """What the generated stubs need of a grpc.aio channel."""

    def __init__(self, client: Process, address: str) -> None:
        self._client = client
        self._address = address
        self._streams: list[Call] = []

    def unary_unary(
        self, method: str, request_serializer: Serializer, response_deserializer: Deserializer, **_: Any
    ) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def ask(
            request: Any,
            timeout: float | None = None,  # noqa: ASYNC109 - as the stubs call it
            wait_for_ready: bool = False,
            metadata: Any = (),
        ) -> Any:
            call = Call(self._client, self._address, method, request_serializer, response_deserializer, timeout)
            call.open(request, wait_for_ready)
            try:
                return await anext(call)
            except asyncio.CancelledError:
                call.cancel()
                raise

        return ask

    def unary_stream(
        self, method: str, request_serializer: Serializer, response_deserializer: Deserializer, **_: Any
    ) -> Callable[..., Call]:
        def begin(request: Any, timeout: float | None = None, metadata: Any = ()) -> Call:
            call = Call(self._client, self._address, method, request_serializer, response_deserializer, timeout)
            call.open(request)
            self._streams.append(call)
            return call

        return begin

    def stream_stream(
        self, method: str, request_serializer: Serializer, response_deserializer: Deserializer, **_: Any
    ) -> Callable[..., Call]:
        def begin(requests: AsyncIterator[Any], timeout: float | None = None, metadata: Any = ()) -> Call:
            call = Call(self._client, self._address, method, request_serializer, response_deserializer, timeout)
            call.open_stream(requests)
            self._streams.append(call)
            return call

        return begin

    async def close(self, _grace: float | None = None) -> None:
        for call in self._streams:
            call.cancel()


class _AbortedError(Exception):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class ServerContext:
    """What the services use of a grpc.aio.ServicerContext."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise _AbortedError(code, details)

    async def send_initial_metadata(self, _metadata: Any) -> None:
        self._call.admit()

    async def write(self, message: Any) -> None:
        self._call.reply(message)

    def time_remaining(self) -> float | None:
        deadline = self._call.deadline
        return None if deadline is None else deadline - asyncio.get_running_loop().time()


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


class Call:
    """The client's end of a call, and the task that serves it at the other. `server` is None until the call arrives."""

    def __init__(
        self,
        client: Process,
        address: str,
        method: str,
        serialize: Serializer,
        deserialize: Deserializer,
        timeout: float | None,
    ) -> None:
        network = client.network
        self.client = client
        self.server: Process | None = None
        self.address = address
        self.method = method
        self.deadline = None if timeout is None else network.loop.now + timeout
        self._serialize, self._deserialize = serialize, deserialize
        self._served: Any = None
        kind = method.rpartition("/")[2]
        self._kind = kind if kind in MISCHIEF else ""
        self._damaged = kind in ("ExportKv", "Propose")
        self._network = network
        self._loop = network.loop
        self._replies = _Inbox(self._loop)
        self._requests = _Inbox(self._loop)
        self._pump: asyncio.Task[None] | None = None
        self._handler: asyncio.Task[None] | None = None
        self._last_up = self._last_down = 0.0
        self._ended = False
        self._admitted: asyncio.Future[None] = self._loop.create_future()
        self._expiry = None if timeout is None else self._loop.call_later(timeout, self._expire)
        listener = network.listeners.get(address)
        self._far_name = listener.process.name if listener is not None else address

    def open(self, request: Any, wait_for_ready: bool = False) -> None:
        """Of one request."""
        if self._begins():
            self._network.tap.wrote(self, True, request)
            self._up(self._arrive, (request, self._network.carry(request, self._serialize)), wait_for_ready)

    def open_stream(self, requests: AsyncIterator[Any]) -> None:
        if self._begins():
            self._up(self._arrive)
            self._pump = self.client.spawn(self._send(requests))

    def joins(self, other: Process) -> bool:
        return other in (self.client, self.server)

    # The client's end.

    def silence(self) -> float:
        """Seconds until an answer comes to a ping that the client sends now, as the connection is."""
        network = self._network
        there = network.arrival(self.client, self._far_name)
        back = network.delay(self._far_name, self.client.name)
        return there + back - self._loop.now

    def _begins(self) -> bool:
        if self.client.alive:
            self.client.calls[self] = None
        else:
            # What a process begins on its way out must not keep it.
            self._finish(unavailable(f"{self.client.name} is dead"))
        return self.client.alive

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        item = await self._replies.get()
        if isinstance(item, _End):
            if item.error is not None:
                raise item.error
            raise StopAsyncIteration
        try:
            reply = self._deserialize(item)
        except DecodeError:
            return None
        if self.client.alive:
            self._network.tap.read(self, True, reply)
        return reply

    @property
    def active(self) -> bool:
        return not self._ended

    async def admission(self) -> None:
        """Waits for the server's first sign, or the end."""
        await asyncio.shield(self._admitted)

    def cancel(self, error: grpc.aio.AioRpcError | None = None) -> None:
        """The client reads no more, or this error."""
        if not self._ended and self.client.alive:
            self._up(self._stop_handler)
        self._finish(error)

    async def _send(self, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                if self.client.alive:
                    self._network.tap.wrote(self, True, request)
                self._up(self._requests.put, self._network.carry(request, self._serialize), disturbed=True)
        finally:
            await requests.aclose()  # type: ignore[attr-defined]
        self._up(self._requests.put, _End())

    def _expire(self) -> None:
        if not self._ended and self.client.alive:
            self._up(self._stop_handler)
        self._finish(rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _finish(self, error: grpc.aio.AioRpcError | None) -> None:
        """The client knows that the call is over."""
        if self._ended:
            return
        self._ended = True
        self.client.calls.pop(self, None)
        if self._expiry is not None:
            self._expiry.cancel()
        if self._pump is not None and self.client.alive:
            self._pump.cancel()
        self._take_admission()
        self._replies.put(_End(error))

    # The server's end.

    def _arrive(self, request: tuple[Any, bytes] | None = None, wait_for_ready: bool = False) -> None:
        listener = self._network.listeners.get(self.address)
        if listener is not None and listener.process.alive:
            self.server = listener.process
            listener.process.calls[self] = None
            self._handler = listener.process.spawn(self._serve(listener, request))
        elif not wait_for_ready:
            self._finish(unavailable(f"nobody listens at {self.address}"))
        elif not self._ended:
            self._loop.post(self._loop.now + _READY_SECONDS, self._arrive, request, wait_for_ready)

    async def _serve(self, listener: Listener, request: tuple[Any, bytes] | None) -> None:
        end = _End()
        try:
            self._served = listener.methods[self.method]
            result = self._handle(request)
            if hasattr(result, "__aiter__"):
                try:
                    async for reply in result:
                        self.reply(reply)
                finally:
                    await result.aclose()
            elif (reply := await result) is not None:
                self.reply(reply)
        except _AbortedError as aborted:
            end = _End(rpc_error(aborted.code, aborted.details))
        except Exception as error:  # noqa: BLE001
            if listener.process.alive:
                self._network.handler_errors.append(f"{self.method}: {error!r}")
            end = _End(rpc_error(grpc.StatusCode.UNKNOWN, repr(error)))
        finally:
            listener.process.calls.pop(self, None)
            if listener.process.alive:
                self._network.tap.served(self)
        self._down(self._end, end)

    def _handle(self, request: tuple[Any, bytes] | None) -> Any:
        """What the handler returns: replies to come, or something to wait for."""
        context = ServerContext(self)
        if request is None:
            return self._served.stream_stream(self._incoming(), context)
        message, raw = request
        self._network.tap.read(self, False, message)
        return (self._served.unary_unary or self._served.unary_stream)(raw, context)

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
        sent = self._network.damage(message) if self._damaged else message
        self._down(self._take, self._network.carry(sent, self._served.response_serializer), disturbed=True)

    def admit(self) -> None:
        if self.server is not None and self.server.alive:
            self._network.tap.admitted(self)
        self._down(self._take_admission)

    def _take_admission(self) -> None:
        if not self._admitted.done():
            self._admitted.set_result(None)

    def _take(self, raw: bytes) -> None:
        if not self._ended:
            self._take_admission()
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

    def _up(self, action: Callable[..., None], *args: Any, disturbed: bool = False) -> None:
        if self.client.alive:
            far_name = self.server.name if self.server is not None else self._far_name
            at = max(self._network.arrival(self.client, far_name), self._last_up)
            if self._post(at, disturbed, self._arrive_up, action, *args):
                self._last_up = at

    def _arrive_up(self, action: Callable[..., None], *args: Any) -> None:
        if self.server is None or self.server.alive:
            action(*args)

    def _down(self, action: Callable[..., None], *args: Any, disturbed: bool = False) -> None:
        if self.server is not None and self.server.alive:
            at = max(self._network.arrival(self.server, self.client.name), self._last_down)
            if self._post(at, disturbed, self._arrive_down, action, *args):
                self._last_down = at

    def _arrive_down(self, action: Callable[..., None], *args: Any) -> None:
        if self.client.alive:
            action(*args)

    def _post(self, at: float, disturbed: bool, *call: Any) -> bool:
        """Returns whether it arrives in its turn. A message of a disturbed stream may be late, lost or come again."""
        kind = self._network.mischief(self._kind, self.client.name, self._far_name) if disturbed and self._kind else ""
        if kind and kind != "lost":
            late = 0.5 if kind == "stale" else 0.05
            self._loop.post(at + late * self._network.rng.random(), *call)
        in_turn = kind not in ("late", "lost")
        if in_turn:
            self._loop.post(at, *call)
        return in_turn
