"""Completions and chats: texts, stops, seeds, parameters, many at once, and clients that go away."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from typing import Any

import httpx
import openai
import pytest

from spool.services.gateway.settings import GatewaySettings, SamplingDefaults
from tests.integration.gateway.expected import (
    CHAT,
    ENDLESS,
    PROMPT,
    THREE,
    TIMEOUT,
    Recorder,
    completion,
    encoded,
    error_of,
    expected_text,
    expected_tokens,
    streamed,
)
from tests.support.gateway import MODEL, Gateways, Served
from tests.support.stand_in_worker import MAX_LENGTH, VOCABULARY

# --- completions ------------------------------------------------------------------------------------------------------


def test_completions_have_openais_shape(gateways: Gateways, client: openai.OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=60)
    assert (done.object, done.id[:5]) == ("text_completion", "cmpl-")
    usage = done.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    spool, details = usage.to_dict()["spool"], usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == spool["accepted"] > 0
    assert details.rejected_prediction_tokens == spool["drafted"] - spool["accepted"] > 0
    *chunks, last = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=60, stream=True, stream_options={"include_usage": True}
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert (last.choices, last.usage and last.usage.completion_tokens) == ([], 60)
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_chats_have_openais_shape(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_completion_tokens": 40}
    done = client.chat.completions.create(**asked)
    assert (done.choices[0].message.role, done.object, done.id[:9]) == ("assistant", "chat.completion", "chatcmpl-")
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert (last.choices, last.usage and last.usage.completion_tokens) == ([], 40)


def test_usage_in_every_event(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = streamed(http, prompt=PROMPT, max_tokens=60, stream_options=options, echo=True)
    usages = [event["usage"] for event in events]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 60
    assert {usage["total_tokens"] - usage["completion_tokens"] for usage in usages} == {usages[0]["prompt_tokens"]}


@pytest.mark.parametrize(
    ("max_tokens", "fields"),
    [(0, {"echo": True, "logprobs": 0}), (1, {}), (7, {"n": 2}), (1, {"echo": True, "n": 2})],
)
def test_prompt_and_max_tokens_may_fill_the_whole_context(
    gateways: Gateways, http: httpx.Client, max_tokens: int, fields: dict[str, Any]
) -> None:
    prompt = [64 + place % 26 for place in range(MAX_LENGTH - max_tokens)]
    asked = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}
    echoed = gateways.tokenizer.decode(prompt) if "echo" in fields else ""
    text = echoed + (expected_text(gateways, prompt, max_tokens) if max_tokens else "")
    assert [choice["text"] for choice in completion(http, **asked)["choices"]] == [text] * fields.get("n", 1)
    *events, _ = streamed(http, **asked)
    first = [choice["text"] for event in events for choice in event["choices"] if not choice["index"]]
    assert "".join(first) == text
    refused = http.post("/v1/completions", json=asked | {"prompt": [*prompt, 1]})
    assert refused.status_code == 400
    limit = f"prompt has {MAX_LENGTH + 1} tokens; the model's limit is {MAX_LENGTH}"
    assert (f"max_tokens of {max_tokens} makes {MAX_LENGTH + 1}" if max_tokens else limit) in error_of(refused)


def test_several_prompts_and_choices(gateways: Gateways, client: openai.OpenAI) -> None:
    texts = ["one", "two", "three"]
    arguments: dict[str, Any] = {"model": MODEL, "prompt": texts, "n": 2, "max_tokens": 10, "seed": 7}
    expected = [expected_text(gateways, encoded(gateways, text), 10) for text in texts for _ in range(2)]
    found = [""] * 6
    for chunk in client.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            found[choice.index] += choice.text
    assert found == expected
    done = client.completions.create(**arguments)
    assert [(choice.index, choice.text) for choice in done.choices] == list(enumerate(expected))
    assert done.usage is not None
    assert done.usage.prompt_tokens == sum(len(encoded(gateways, text)) for text in texts)
    assert (done.usage.completion_tokens, done.usage.to_dict()["spool"]["seed"]) == (60, 7)


@pytest.mark.parametrize("chat", [False, True])
def test_ids_of_the_tokens_of_prompts(gateways: Gateways, http: httpx.Client, chat: bool) -> None:
    prompt = list(gateways.tokenizer.encode_chat(CHAT) if chat else encoded(gateways))
    route = "chat/completions" if chat else "completions"
    body = {"max_tokens": 4, "n": 2, **({"messages": CHAT} if chat else {"prompt": PROMPT})}
    assert "token_ids" not in http.post(f"/v1/{route}", json=body).text
    body["return_token_ids"] = True
    whole = http.post(f"/v1/{route}", json=body).json()
    holders = [whole] if chat else whole["choices"]
    assert [holder["prompt_token_ids"] for holder in holders] == [prompt] * len(holders)
    events = streamed(http, route, **body)
    parts = events if chat else [choice for event in events for choice in event["choices"]]
    assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [prompt] * len(holders)


def test_parts_of_text(gateways: Gateways, client: openai.OpenAI) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    prompt = gateways.tokenizer.encode_chat([{"role": "user", "content": "hel\nlo"}])
    done = client.chat.completions.create(model=MODEL, messages=parts, max_tokens=8)
    assert done.choices[0].message.content == expected_text(gateways, prompt, 8)


def test_no_stop_string_in_the_first_tokens(gateways: Gateways, http: httpx.Client) -> None:
    tokens = expected_tokens(gateways, encoded(gateways), 40)
    early, text = gateways.tokenizer.decode(tokens[:7]), gateways.tokenizer.decode(tokens)
    assert text.startswith(early)
    stop = next(letter for letter in early if letter != "\ufffd" and letter in text[len(early) :])
    [choice] = completion(http, max_tokens=40, stop=stop, min_tokens=7)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop, len(early))], "stop")


# --- seeds, speculation, parameters -----------------------------------------------------------------------------------


def test_seed_is_reported(http: httpx.Client) -> None:
    one, two = (http.post("/v1/completions", json={"prompt": PROMPT}) for _ in range(2))
    assert one.headers["x-spool-seed"] == str(one.json()["usage"]["spool"]["seed"])
    assert one.headers["x-spool-seed"] != two.headers["x-spool-seed"]
    assert max(int(drawn.headers["x-spool-seed"]) for drawn in (one, two)) < 2**53
    # JavaScript cannot hold the unsigned number that a negative seed stands for.
    for seed in (-1, -(2**53) + 1, -(2**63), 2**64 - 1):
        given = http.post("/v1/completions", json={"prompt": PROMPT, "seed": seed})
        assert given.headers["x-spool-seed"] == str(given.json()["usage"]["spool"]["seed"]) == str(seed)


def test_parameters_reach_the_scheduler(gateways: Gateways) -> None:
    recorder = Recorder(gateways)
    settings = GatewaySettings(sampling=SamplingDefaults(temperature=0.5, top_p=0.9, top_k=40))
    asked = {
        "n": 2,
        "max_tokens": 3,
        "seed": 5,
        "temperature": 0.25,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"7": -100, "8": 2.5},
        "stop_token_ids": [9],
        "logprobs": 2,
        "spool": {"draft_length": 3},
        "top_k": 10**9,
    }
    for options, body in ((settings, asked), (settings, {}), (None, {"spool": {"speculation": False}})):
        with gateways.serve(options, recorder) as served, httpx.Client(base_url=served.url, timeout=TIMEOUT) as http:  # type: ignore[arg-type]
            completion(http, **body)
    one, two, defaults, openais = recorder.requests
    assert (one.max_tokens, one.draft_length, one.top_logprobs) == (3, 3, 2)
    assert one.stop_token_ids == {9, *gateways.tokenizer.stop_token_ids}
    expected: dict[str, Any] = {
        name: asked[name] for name in asked.keys() & {each.name for each in fields(one.sampling)}
    }
    expected |= {"top_k": VOCABULARY, "logit_bias": {7: -100, 8: 2.5}, "top_p": 0.9}
    assert {name: getattr(one.sampling, name) for name in expected} == expected
    assert (one.sampling.seed, two.sampling.seed) == (5, 6)
    assert (defaults.sampling.temperature, defaults.sampling.top_k, defaults.sampling.min_p) == (0.5, 40, 0)
    assert (defaults.max_tokens, defaults.top_logprobs, defaults.draft_length) == (16, None, None)
    assert defaults.deadline_seconds == pytest.approx(settings.default_timeout_seconds, abs=5)
    assert (openais.sampling.temperature, openais.draft_length) == (1, 0)


# --- many at once, and clients that go away ---------------------------------------------------------------------------


def connected(served: Served, body: dict[str, Any], cut: int | None = None) -> socket.socket:
    """A connection on which the request, or all but its end, has been sent."""
    host, port = served.url.removeprefix("http://").split(":")
    content = json.dumps(body)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n{content}".encode()[:cut])
    return connection


def test_many_cancelled_at_any_moment(slow: Gateways, slowly_served: Served) -> None:
    def cancel(number: int) -> None:
        with connected(slowly_served, {**THREE, "stream": number % 2 == 0}, None if number % 5 else -1) as connection:
            end = time.monotonic() + number % 7 * 0.01
            while (left := end - time.monotonic()) > 0:
                connection.settimeout(left)
                with suppress(TimeoutError):
                    connection.recv(65536)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(cancel, range(100)))
    slow.wait_until_idle()


def test_silent_streams_send_comments_and_closing_them_frees_everything(slow: Gateways) -> None:
    with (
        slow.serve(GatewaySettings(ping_seconds=0.02)) as served,
        httpx.stream(
            "POST", f"{served.url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=TIMEOUT
        ) as reply,
    ):
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["cache-control"] == "no-cache"
        lines = reply.iter_lines()
        assert next(line for line in lines if line.startswith(":")) == ": ping"
        assert next(line for line in lines if line.startswith("data: "))
    slow.wait_until_idle()
