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

from spool.protos import draft_pb2, worker_pb2
from tests.sim.cell.process import Process
from tests.sim.cell.rpc.calls import MISCHIEF, UNNOTICED
from tests.sim.cell.virtual_threads import Threads
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

    def admitted(self, call: Any) -> None:
        """The server's handler has let the client in."""

    def served(self, call: Any) -> None:
        """The server's handler has ended."""


class Network:
    """Who listens where, and how long messages take. `latency` is the longest of an undisturbed one, in seconds."""

    def __init__(self, loop: VirtualLoop, threads: Threads, rng: random.Random, latency: float) -> None:
        self.loop = loop
        self.threads = threads
        self.rng = rng
        self.listeners: dict[str, Listener] = {}
        self.processes: list[Process] = []
        self.handler_errors: list[str] = []
        self.meddled = 0
        self.tap: Any = Tap()
        self._latency = latency
        # By the names of who sends and who receives.
        self._blocked: dict[tuple[str, str], float] = {}
        self._slow: dict[tuple[str, str], tuple[float, float]] = {}
        # By the kind of stream and the name of one of its ends.
        self._meddling: dict[tuple[str, str], Meddling] = {}
        self._damaging: Meddling | None = None
        self._corrupting: Meddling | None = None
        self._truncating: Meddling | None = None
        self._truncated = 0

    # Faults.

    def block(self, one: str, other: str, seconds: float) -> None:
        """Nothing sent between the two arrives before the time is over."""
        for sender, receiver in ((one, other), (other, one)):
            self.block_one_way(sender, receiver, seconds)

    def block_one_way(self, sender: str, receiver: str, seconds: float) -> None:
        """Nothing that the one sends to the other arrives before the time is over; the other way is open."""
        self._blocked[sender, receiver] = self.loop.now + seconds

    def slow_down(self, one: str, other: str, seconds: float, delay: float) -> None:
        """What is sent between the two within `seconds` takes up to `delay` longer; later messages may overtake it."""
        self._slow[one, other] = self._slow[other, one] = (self.loop.now + seconds, delay)

    def meddle(self, stream: str, name: str, seconds: float, chance: float) -> None:
        """With streams of this kind, a key of `MISCHIEF`, of the process named."""
        self._meddling[stream, name] = Meddling(self.loop.now + seconds, chance)

    def damage_kv(self, seconds: float, chance: float) -> None:
        """Of pages of KV on their way between workers."""
        self._damaging = Meddling(self.loop.now + seconds, chance)

    def corrupt_proposals(self, seconds: float, chance: float) -> None:
        """On their way from draft workers."""
        self._corrupting = Meddling(self.loop.now + seconds, chance)

    def truncate(self, seconds: float, chance: float) -> None:
        """Any message."""
        self._truncating = Meddling(self.loop.now + seconds, chance)

    def heal(self) -> None:
        self._damaging = self._corrupting = self._truncating = None
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
        return self.loop.now + self.delay(sender.name, receiver_name)

    def delay(self, sender_name: str, receiver_name: str) -> float:
        delay = self.rng.random() * self._latency
        if self._blocked or self._slow:
            pair = (sender_name, receiver_name)
            slow = self._slow.get(pair)
            if slow is not None and self.loop.now < slow[0]:
                delay += self.rng.random() * slow[1]
            delay = max(delay, self._blocked.get(pair, 0.0) - self.loop.now)
        return delay

    def carry(self, message: Message, serialize: Callable[[Any], bytes]) -> bytes:
        """What arrives of a message that is sent now: most often all of it."""
        raw, truncating = serialize(message), self._truncating
        if truncating is None or self.loop.now > truncating.until or self._truncated >= _MOST_TRUNCATED:
            return raw
        if self.rng.random() > truncating.chance:
            return raw
        self._truncated += 1
        return _unreadable(type(message), raw, self.rng.random())

    def damage(self, message: Any) -> Any:
        """What arrives of a part of KV that is being moved, or of proposals: most often the message itself."""
        part = isinstance(message, worker_pb2.KvPart)
        damaging = self._damaging if part else self._corrupting
        if damaging is None or self.loop.now > damaging.until or self.rng.random() > damaging.chance:
            return message
        return self._damaged_kv(message) if part else corrupted(message, self.rng)

    def _damaged_kv(self, part: worker_pb2.KvPart) -> worker_pb2.KvPart:
        if not part.HasField("page"):
            return worker_pb2.KvPart(header=worker_pb2.KvHeader(model_id="another"))
        data = bytearray(part.page.data)
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        page = worker_pb2.KvPage(index=part.page.index, data=bytes(data), checksum=part.page.checksum)
        return worker_pb2.KvPart(page=page)

    def mischief(self, stream: str, one: str, other: str) -> str:
        """What happens to a message of such a stream between the two: one of `MISCHIEF`, or ""."""
        if not self._meddling:
            return ""
        meddling = self._meddling.get((stream, one)) or self._meddling.get((stream, other))
        if meddling is None or self.loop.now > meddling.until or self.rng.random() > meddling.chance:
            return ""
        self.meddled += 1
        return self.rng.choice(MISCHIEF[stream])


def corrupted(proposals: draft_pb2.Proposals, rng: random.Random) -> draft_pb2.Proposals:
    """Changed in one place: another column of another length, or a number that is wrong, most often without a sign."""
    changed = draft_pb2.Proposals()
    changed.CopyFrom(proposals)
    columns = [changed.sequence_ids, changed.digests, changed.counts, changed.tokens]
    column: Any = columns[rng.randrange(len(columns))]
    if not column:
        changed.counts.append(rng.randrange(3))
        return changed
    place = rng.randrange(len(column))
    match rng.choice(("drop", "twice", "other", "other", "beyond")):
        case "drop":
            del column[place]
        case "twice":
            column.append(column[place])
        case "other":
            column[place] ^= 1 << rng.randrange(6)
        case "beyond":
            column[place] ^= 1 << rng.randrange(31)
    return changed


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
