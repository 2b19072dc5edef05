"""The expected output of gateways over stand-in workers, and backends that fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from services.backend.interface import GenerationRequest, LoadFigures
from services.scheduler_client.local import LocalBackend, LocalStream
from tests.support.gateway import Gateways
from tests.support.stand_in_worker import continuation
from tests.support.waiting import LONG

PROMPT = "once upon a time"
TIMEOUT = 2 * LONG
CHAT: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]

ENDLESS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "spool": {"speculation": False}}
THREE = {**ENDLESS, "n": 3}

# A step takes so long that a sequence of ENDLESS outlasts every wait: only cancelling frees its pages in time.
STEP_SECONDS = 0.08
assert STEP_SECONDS * ENDLESS["max_tokens"] > LONG


def expected_tokens(gateways: Gateways, prompt: Sequence[int], count: int) -> list[int]:
    """The output of the stand-in model, up to its end token."""
    tokens = continuation(prompt, count)
    ends = [place for place, token in enumerate(tokens) if token in gateways.tokenizer.stop_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def expected_text(gateways: Gateways, prompt: Sequence[int], count: int) -> str:
    return gateways.tokenizer.decode(expected_tokens(gateways, prompt, count))


def encoded(gateways: Gateways, text: str = PROMPT) -> list[int]:
    return gateways.tokenizer.encode(text)


def stop_cases(gateways: Gateways) -> list[tuple[str, str, int]]:
    """Stop strings from anywhere in the text, each with the remaining text and the count of tokens up to its end."""
    tokens = expected_tokens(gateways, encoded(gateways), 40)
    text = gateways.tokenizer.decode(tokens)
    cases = []
    for start in range(0, len(text) - 4):
        stop = text[start : start + 3]
        if "\ufffd" in stop:
            continue
        before = text[: text.find(stop)]
        count = next(n for n in range(1, 41) if before + stop in gateways.tokenizer.decode(tokens[:n]))
        cases.append((stop, before, count))
    return cases


def message_of(response: httpx.Response) -> str:
    """The message of an error in OpenAI's shape."""
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return str(error["message"])


class Recorder(LocalBackend):
    """Keeps the requests that the gateway sends."""

    def __init__(self, gateways: Gateways) -> None:
        super().__init__(gateways.service)
        self.requests: list[GenerationRequest] = []

    async def submit(self, request: GenerationRequest) -> LocalStream:
        self.requests.append(request)
        return await super().submit(request)


class NoTarget(LocalBackend):
    async def load(self) -> LoadFigures:
        return LoadFigures(0, 0, ())
