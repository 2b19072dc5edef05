"""spool_client against gateways whose connections break: streams go on byte for byte."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scheduler.config import Policy, SchedulerConfig
from spool_client import AsyncClient, Chat, ChatMessage, GenerateRequest, GenerateStreamResponse, RetryPolicy
from tests.support.cells import running_cell
from tests.support.gateway import MODEL, running_gateway, save_tokenizer
from tests.support.stand_in_worker import continuation
from tests.support.tcp_proxy import tcp_proxy
from tests.support.waiting import LONG
from tests.support.watched_engine import WatchedEngine

TOKENS, CHOICES = 40, 2
STEPS = 3
"""Of the target before the first break. A step gives each choice one token."""
RETRY = RetryPolicy(attempts=20, first_pause=0.02, longest_pause=0.2)
SHARED = {"max_tokens": TOKENS, "n": CHOICES, "ignore_eos": True, "draft_length": 0}
REQUESTS = [
    GenerateRequest(text="once upon a time", top_logprobs=1, echo=True, **SHARED),
    GenerateRequest(chat=Chat(messages=[ChatMessage(role="user", content="hello")]), temperature=0.8, **SHARED),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=["text", "chat"])
def test_streams_go_on_when_connections_break(request_: GenerateRequest, tmp_path: Path) -> None:
    tokenizer, watched, parts = save_tokenizer(tmp_path), WatchedEngine(), list[GenerateStreamResponse]()
    config, digest = SchedulerConfig(policy=Policy.RAGGED), tokenizer.vocabulary_digest.hex()

    async def run() -> int:
        async with (
            running_cell(config=config, tokenizer_digest=digest, model_id=MODEL) as cell,
            running_gateway(cell, tokenizer) as first,
            running_gateway(cell, tokenizer) as other,
            tcp_proxy(first.address) as proxy,
            AsyncClient(proxy.address, retry=RETRY) as client,
        ):
            watched.watch(cell.workers[1].executor)
            watched.gate.close(but_for=STEPS)
            breaks = tokens = 0
            try:
                async for part in client.stream(request_, timeout=LONG):
                    parts.append(part)
                    tokens += len(part.choice.token_ids)
                    if breaks == 0 and tokens:
                        breaks += proxy.cut()
                        watched.gate.close(but_for=5 * STEPS)
                    elif breaks == 1 and tokens > STEPS * CHOICES:
                        proxy.lead_to(other.address)
                        breaks += proxy.cut()
                        watched.gate.open()
                await cell.wait_empty()
            finally:
                watched.gate.open()
            assert proxy.connections >= 3
            return breaks

    assert asyncio.run(run()) == 2
    chat = [{"role": "user", "content": "hello"}]
    prompt = tokenizer.encode(request_.text) if request_.text else tokenizer.encode_chat(chat)
    tokens = continuation(prompt, TOKENS)
    text = (request_.text if request_.echo else "") + tokenizer.decode(tokens)
    for index in range(CHOICES):
        choices = [part.choice for part in parts if part.HasField("choice") and part.choice.index == index]
        assert [token for choice in choices for token in choice.token_ids] == tokens
        assert "".join(choice.text for choice in choices) == text
        logprobs = [entry.chosen.token_id for choice in choices for entry in choice.logprobs]
        assert logprobs == (tokens if request_.HasField("top_logprobs") else [])
        assert [bool(choice.finish_reason) for choice in choices] == [False] * (len(choices) - 1) + [True]
    assert parts[-1].usage.completion_tokens == TOKENS * CHOICES
    assert len({part.id for part in parts}) == 1
