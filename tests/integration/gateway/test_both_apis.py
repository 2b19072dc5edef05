"""Completions and chats in four ways: over HTTP and over gRPC, whole and as streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest

from tests.integration.gateway.expected import CHAT, PROMPT, encoded, expected_text, expected_tokens
from tests.support.clients import Answer, Choice, clients_of
from tests.support.gateway import Gateways, Served
from tests.support.stand_in_worker import MAX_LENGTH, ROW_FAILS

Ask = Callable[..., Answer]


INTERNAL, NOT_FOUND = grpc.StatusCode.INTERNAL, grpc.StatusCode.NOT_FOUND
# The statuses of a sequence that fails, which a stream over HTTP has begun by then, and of a model that is not there.
WAYS = {
    "http": (500, 404),
    "http stream": (200, 404),
    "grpc": (INTERNAL, NOT_FOUND),
    "grpc stream": (INTERNAL, NOT_FOUND),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ask(way: str, served: Served) -> Ask:
    api, _, stream = way.partition(" ")

    async def asked(*prompt: Any, **fields: Any) -> Answer:
        async with clients_of(served) as clients:
            call = clients.over_http if api == "http" else clients.over_grpc
            return await call(*prompt, stream=bool(stream), **fields)

    return lambda *prompt, **fields: asyncio.run(asked(*prompt, **fields))


def expected(gateways: Gateways, prompt: Sequence[int], count: int) -> Choice:
    tokens = expected_tokens(gateways, prompt, count)
    return Choice(gateways.tokenizer.decode(tokens), tokens, "length" if len(tokens) == count else "stop")


def test_prompts_are_texts_token_ids_and_chats(gateways: Gateways, ask: Ask) -> None:
    prompt, chat = encoded(gateways), gateways.tokenizer.encode_chat(CHAT)
    developer = [{**CHAT[0], "role": "developer"}, *CHAT[1:]]
    for given, tokens in ((PROMPT, prompt), (prompt, prompt), (CHAT, chat), (developer, chat)):
        answer = ask(given, max_tokens=40)
        assert answer.choices == [expected(gateways, tokens, 40)]
        assert answer.usage[:2] == (len(tokens), 40)
        assert 0 < answer.usage.accepted < answer.usage.drafted


def test_choices_have_seeds_in_sequence(gateways: Gateways, ask: Ask) -> None:
    answer = ask(PROMPT, n=3, max_tokens=10, seed=7)
    assert answer.choices == [expected(gateways, encoded(gateways), 10)] * 3
    assert (answer.usage.completion, answer.usage.seed) == (30, 7)


@pytest.mark.sampled(4, 1)
def test_answers_go_on_until_the_model_ends_them(gateways: Gateways, ask: Ask) -> None:
    chat = expected(gateways, gateways.tokenizer.encode_chat(CHAT), MAX_LENGTH)
    assert (chat.end, len(chat.tokens) > 16) == ("stop", True)
    assert ask(CHAT, draft_length=8).choices == [chat]
    ignored = ask(CHAT, max_tokens=len(chat.tokens) + 5, ignore_eos=True, draft_length=8)
    assert ignored.usage.completion == len(chat.tokens) + 5


@pytest.mark.sampled(3, 1)
def test_stop_strings_cut_exactly_and_usage_agrees(gateways: Gateways, ask: Ask) -> None:
    tokens, decode = expected_tokens(gateways, encoded(gateways), 40), gateways.tokenizer.decode
    text = decode(tokens)
    stop = next(text[place : place + 3] for place in range(20, len(text)) if "\ufffd" not in text[place : place + 3])
    before = text[: text.index(stop)]
    count = next(count for count in range(1, 41) if before + stop in decode(tokens[:count]))
    answer = ask(PROMPT, max_tokens=40, stop=[stop])
    assert answer.choices == [Choice(before, tokens[:count], "stop", stop)]
    assert answer.usage.completion == count
    kept = ask(PROMPT, max_tokens=40, stop=[stop], include_stop_str_in_output=True)
    assert (kept.choices[0].text, kept.usage.completion) == (before + stop, count)


def test_stop_tokens_are_named(gateways: Gateways, ask: Ask) -> None:
    tokens = expected_tokens(gateways, encoded(gateways), 20)
    end = tokens.index(tokens[9])
    [choice] = ask(PROMPT, max_tokens=20, stop_token_ids=[tokens[9]]).choices
    assert choice == Choice(gateways.tokenizer.decode(tokens[:end]), tokens[: end + 1], "stop", tokens[9])


def test_speculation_can_be_turned_off(gateways: Gateways, ask: Ask) -> None:
    answer = ask(PROMPT, max_tokens=30, draft_length=0)
    assert answer.choices == [expected(gateways, encoded(gateways), 30)]
    assert (answer.usage.drafted, answer.usage.accepted) == (0, 0)


@pytest.mark.parametrize("proposer", ["draft", "lookup", "none"])
def test_a_request_can_name_who_proposes(gateways: Gateways, ask: Ask, proposer: str) -> None:
    """The text is the same. No target here looks up."""
    answer = ask(PROMPT, max_tokens=30, draft_length=3, proposer=proposer)
    assert answer.choices == [expected(gateways, encoded(gateways), 30)]
    assert (answer.usage.drafted > 0) == (proposer == "draft")


def test_echo(gateways: Gateways, ask: Ask) -> None:
    """Stop strings are not looked for in the prompt."""
    [choice] = ask(PROMPT, max_tokens=5, echo=True, stop=[PROMPT[:4]]).choices
    assert choice.text == PROMPT + expected_text(gateways, encoded(gateways), 5)


def test_failures(way: str, ask: Ask) -> None:
    failed, unknown = ask([ROW_FAILS]), ask("a", model="gpt é")
    assert (failed.status, unknown.status) == WAYS[way]
    assert (failed.code, unknown.code) == ("sequence_failed", "model_not_found")
    assert "unlucky token" in failed.error
