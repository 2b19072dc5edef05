"""Who listens where, how long messages take between simulated processes, and what goes wrong on the way."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from protos import worker_pb2
from tests.sim.cell.process import Process
from tests.sim.cell.rpc.calls import UNNOTICED
from tests.sim.cell.virtual_time import VirtualLoop, result_of

_MOST_TRUNCATED = 6
"""Messages of a schedule."""


class Listener:
    """In the place of a grpc.aio server. `methods` holds the handlers by full method name, behind the services' own
    guards."""

    process: Process

    def __init__(self, options: object, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> None:
        self.methods: dict[str, Any] = {}
        self._interceptors = interceptors

    async def start(self) -> None:
        return

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        return

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        for name, handler in handlers.items():
            method = f"/{service}/{name}"
            for interceptor in reversed(self._interceptors):
                handler = result_of(_guarded(interceptor, method, handler))
            self.methods[method] = handler


async def _guarded(interceptor: grpc.aio.ServerInterceptor, method: str, handler: Any) -> Any:
    async def unguarded(_details: grpc.HandlerCallDetails) -> Any:
        return handler

    details: Any = SimpleNamespace(method=method, invocation_metadata=())
    return await interceptor.intercept_service(unguarded, details)


@dataclass(slots=True)
class Meddling:
    """What happens to messages, each with this chance, beyond what gRPC allows."""

    until: float
    chance: float


class Tap:
    """Hears each message twice: where a process hands it over to gRPC, and where another one takes it from there.

    Between the two it may be late, come twice, or get lost. `by_client` says which end of the call it is.
    """

    def wrote(self, call: Any, by_client: bool, message: Any) -> None: ...

    def read(self, call: Any, by_client: bool, message: Any) -> None: ...

    def served(self, call: Any) -> None:
        """The server's handler has ended."""


class Network:
    """Who listens where, and how long messages take. `latency` is the longest of an undisturbed one, in seconds."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, latency: float) -> None:
        self.loop = loop
        self.rng = rng
        self.listeners: dict[str, Listener] = {}
        self.processes: list[Process] = []
        self.handler_errors: list[str] = []
        self.meddled = 0
        self.tap: Any = Tap()
        self._latency = latency
        self._blocked: dict[frozenset[str], float] = {}
        self._slow: dict[frozenset[str], tuple[float, float]] = {}
        self._meddling: dict[str, Meddling] = {}
        self._damaging: Meddling | None = None
        self._truncating: Meddling | None = None
        self._truncated = 0

    # Faults.

    def block(self, one: str, other: str, seconds: float) -> None:
        """Nothing sent between the two arrives before the time is over."""
        self._blocked[frozenset((one, other))] = self.loop.now + seconds

    def slow_down(self, one: str, other: str, seconds: float, delay: float) -> None:
        """What is sent between the two within `seconds` takes up to `delay` longer; later messages may overtake it."""
        self._slow[frozenset((one, other))] = (self.loop.now + seconds, delay)

    def meddle(self, name: str, seconds: float, chance: float) -> None:
        """With step streams of the process named."""
        self._meddling[name] = Meddling(self.loop.now + seconds, chance)

    def damage_kv(self, seconds: float, chance: float) -> None:
        """Of pages of KV on their way between workers."""
        self._damaging = Meddling(self.loop.now + seconds, chance)

    def truncate(self, seconds: float, chance: float) -> None:
        """Any message."""
        self._truncating = Meddling(self.loop.now + seconds, chance)

    def heal(self) -> None:
        self._damaging = self._truncating = None
        self._blocked.clear()
        self._slow.clear()
        self._meddling.clear()

    def cut(self, one: Process, other: Process) -> None:
        """Every open stream between the two breaks; each end notices in its own time."""
        for process in (one, other):
            process.broken_until = self.loop.now + max(UNNOTICED)
        for call in list(one.calls):
            if call.joins(other):
                call.break_off("the connection was reset")

    # Messages.

    def arrival(self, sender: Process, receiver_name: str) -> float:
        """When what is sent now arrives, if nothing sent before is still on the way."""
        at = self.loop.now + self.rng.random() * self._latency
        if self._blocked or self._slow:
            pair = frozenset((sender.name, receiver_name))
            slow = self._slow.get(pair)
            if slow is not None and self.loop.now < slow[0]:
                at += self.rng.random() * slow[1]
            at = max(at, self._blocked.get(pair, 0.0))
        return at

    def carry(self, message: Message, serialize: Callable[[Any], bytes]) -> bytes:
        """What arrives of a message that is sent now: most often all of it."""
        raw, truncating = serialize(message), self._truncating
        if truncating is None or self.loop.now > truncating.until or self._truncated >= _MOST_TRUNCATED:
            return raw
        if self.rng.random() > truncating.chance:
            return raw
        self._truncated += 1
        return _unreadable(type(message), raw, self.rng.random())

    def damage(self, part: worker_pb2.KvPart) -> worker_pb2.KvPart:
        """What arrives of a part of KV that is being moved: most often the part itself."""
        damaging = self._damaging
        if damaging is None or self.loop.now > damaging.until or self.rng.random() > damaging.chance:
            return part
        if not part.HasField("page"):
            return worker_pb2.KvPart(header=worker_pb2.KvHeader(model_id="another"))
        data = bytearray(part.page.data)
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        page = worker_pb2.KvPage(index=part.page.index, data=bytes(data), checksum=part.page.checksum)
        return worker_pb2.KvPart(page=page)

    def mischief(self, one: str, other: str) -> str:
        """What happens to a message of a step stream between the two: "", "twice" or "late"."""
        if not self._meddling:
            return ""
        meddling = self._meddling.get(one) or self._meddling.get(other)
        if meddling is None or self.loop.now > meddling.until or self.rng.random() > meddling.chance:
            return ""
        self.meddled += 1
        return self.rng.choice(("twice", "late"))


def _unreadable(kind: type[Message], raw: bytes, place: float) -> bytes:
    """Ends within a field. At a field's border it would be another, shorter message, which HTTP/2 never delivers.

    A message without fields stays as it is.
    """
    start = int(place * len(raw))
    for end in chain(range(start, 0, -1), range(start + 1, len(raw))):
        try:
            kind().ParseFromString(raw[:end])
        except DecodeError:
            return raw[:end]
    return raw
