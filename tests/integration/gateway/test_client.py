"""spool_client against gateways whose connections break: streams go on byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scheduler.config import Policy, SchedulerConfig
from services.text.tokenizer import ModelTokenizer
from spool_client import AsyncClient, Chat, ChatMessage, Client, GenerateRequest, GenerateStreamResponse, RetryPolicy
from tests.support.cells import Cell, running_cell
from tests.support.gateway import MODEL, Served, running_gateway, save_tokenizer
from tests.support.stand_in_worker import continuation
from tests.support.tcp_proxy import TcpProxy, tcp_proxy
from tests.support.waiting import LONG
from tests.support.watched_engine import WatchedEngine

TOKENS, CHOICES = 40, 2
# That the target takes before the first break.
STEPS = 3
RETRY = RetryPolicy(attempts=20, first_pause=0.02, longest_pause=0.2)
Parts = list[GenerateStreamResponse]


@dataclass
class Scene:
    """Two gateways of one cell, the first one behind a connection that can be cut."""

    cell: Cell
    tokenizer: ModelTokenizer
    watched: WatchedEngine
    proxy: TcpProxy
    other: Served
    breaks: int = 0

    def prompt(self, request: GenerateRequest) -> list[int]:
        if request.HasField("chat"):
            return self.tokenizer.encode_chat([{"role": "user", "content": request.chat.messages[0].content}])
        return self.tokenizer.encode(request.text)

    async def look_at(self, parts: Parts) -> None:
        """Breaks the connection after the first token, and again after the first one of the second call, which finds
        the other gateway then. A step gives each choice one token, and the target is held before it has given all."""
        tokens = sum(len(part.choice.token_ids) for part in parts)
        if self.breaks == 0 and tokens:
            self.breaks += self.proxy.cut()
            self.watched.gate.close(but_for=5 * STEPS)
        elif self.breaks == 1 and tokens > STEPS * CHOICES:
            self.proxy.lead_to(self.other.address)
            self.breaks += self.proxy.cut()
            self.watched.gate.open()


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    tokenizer, watched = save_tokenizer(folder), WatchedEngine()
    digest = tokenizer.vocabulary_digest.hex()
    async with (
        running_cell(config=SchedulerConfig(policy=Policy.RAGGED), tokenizer_digest=digest, model_id=MODEL) as cell,
        running_gateway(cell, tokenizer) as first,
        running_gateway(cell, tokenizer) as other,
        tcp_proxy(first.address) as proxy,
    ):
        watched.watch(cell.workers[1].executor)
        watched.gate.close(but_for=STEPS)
        try:
            yield Scene(cell, tokenizer, watched, proxy, other)
            await cell.wait_empty()
        finally:
            watched.gate.open()


Between = Callable[[Parts], Awaitable[None]]


async def read_in_a_thread(address: str, request: GenerateRequest, between: Between) -> Parts:
    loop = asyncio.get_running_loop()

    def read() -> Parts:
        parts: Parts = []
        with Client(address, retry=RETRY) as client:
            for part in client.stream(request, timeout=LONG):
                parts.append(part)
                asyncio.run_coroutine_threadsafe(between(parts), loop).result(LONG)
        return parts

    return await asyncio.to_thread(read)


async def read_in_the_loop(address: str, request: GenerateRequest, between: Between) -> Parts:
    parts: Parts = []
    async with AsyncClient(address, retry=RETRY) as client:
        async for part in client.stream(request, timeout=LONG):
            parts.append(part)
            await between(parts)
    return parts


@pytest.mark.parametrize("read", [read_in_a_thread, read_in_the_loop])
@pytest.mark.parametrize(
    "fields",
    [
        {"text": "once upon a time", "top_logprobs": 1, "echo": True},
        {"chat": Chat(messages=[ChatMessage(role="user", content="hello")]), "temperature": 0.8},
    ],
    ids=["text", "chat"],
)
def test_streams_go_on(read: Callable[..., Awaitable[Parts]], fields: dict[str, Any], tmp_path: Path) -> None:
    request = GenerateRequest(max_tokens=TOKENS, n=CHOICES, ignore_eos=True, draft_length=0, **fields)

    async def run() -> tuple[Scene, Parts]:
        async with scene(tmp_path) as here:
            parts = await read(here.proxy.address, request, here.look_at)
            return here, parts

    here, parts = asyncio.run(run())
    tokens = continuation(here.prompt(request), TOKENS)
    text = (request.text if request.echo else "") + here.tokenizer.decode(tokens)
    for index in range(CHOICES):
        choices = [part.choice for part in parts if part.HasField("choice") and part.choice.index == index]
        assert [token for choice in choices for token in choice.token_ids] == tokens
        assert "".join(choice.text for choice in choices) == text
        if request.HasField("top_logprobs"):
            assert [entry.chosen.token_id for choice in choices for entry in choice.logprobs] == tokens
        assert [bool(choice.finish_reason) for choice in choices] == [False] * (len(choices) - 1) + [True]
    assert parts[-1].usage.completion_tokens == TOKENS * CHOICES
    assert here.breaks == 2
    assert here.proxy.connections >= 3
    assert len({part.id for part in parts}) == 1
