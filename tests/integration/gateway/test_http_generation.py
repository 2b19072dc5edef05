"""Completions and chats: texts, stops, seeds, parameters, many at once, and clients that go away."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest

from services.gateway.settings import GatewaySettings, SamplingDefaults
from tests.integration.gateway.expected import (
    CHAT,
    ENDLESS,
    PROMPT,
    THREE,
    TIMEOUT,
    Recorder,
    completion,
    encoded,
    expected_text,
    expected_tokens,
    message_of,
    stop_cases,
    streamed,
)
from tests.support.gateway import MODEL, Gateways, Served
from tests.support.stand_in_worker import MAX_LENGTH, VOCABULARY
from tests.support.waiting import LONG, wait_until

# --- completions ------------------------------------------------------------------------------------------------------


def test_completion_is_the_models_own(gateways: Gateways, client: openai.OpenAI) -> None:
    prompt = encoded(gateways)
    done = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=60)
    assert done.choices[0].text == expected_text(gateways, prompt, 60)
    assert (done.choices[0].finish_reason, done.object, done.id[:5]) == ("length", "text_completion", "cmpl-")
    usage = done.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(prompt), 60, len(prompt) + 60)
    spool, details = usage.to_dict()["spool"], usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == spool["accepted"] > 0
    assert details.rejected_prediction_tokens == spool["drafted"] - spool["accepted"] > 0


def test_streamed_completion_is_the_same(gateways: Gateways, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=60, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected_text(gateways, encoded(gateways), 60)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert (last.choices, last.usage and last.usage.completion_tokens) == ([], 60)
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


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
    [(0, {"echo": True, "logprobs": 0}), (1, {}), (7, {"n": 2}), (7, {"best_of": 2}), (1, {"echo": True, "n": 2})],
)
def test_prompt_and_max_tokens_may_fill_the_whole_context(
    gateways: Gateways, http: httpx.Client, max_tokens: int, fields: dict[str, Any]
) -> None:
    prompt = [64 + place % 26 for place in range(MAX_LENGTH - max_tokens)]
    asked = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}
    echoed = gateways.tokenizer.decode(prompt) if "echo" in fields else ""
    text = echoed + (expected_text(gateways, prompt, max_tokens) if max_tokens else "")
    assert [choice["text"] for choice in completion(http, **asked)["choices"]] == [text] * fields.get("n", 1)
    if "best_of" not in fields:
        *events, _ = streamed(http, **asked)
        first = [choice["text"] for event in events for choice in event["choices"] if not choice["index"]]
        assert "".join(first) == text
    refused = http.post("/v1/completions", json=asked | {"prompt": [*prompt, 1]})
    assert refused.status_code == 400
    assert f"max_tokens of {max_tokens} makes {MAX_LENGTH + 1}" in message_of(refused)


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


def test_prompts_as_token_ids_and_echo(gateways: Gateways, http: httpx.Client) -> None:
    one, two = encoded(gateways, "one"), encoded(gateways, "two!")
    # Stop strings are not looked for in the prompt.
    done = completion(http, prompt=[one, two], max_tokens=5, echo=True, stop=["two", "one"])
    assert [choice["text"] for choice in done["choices"]] == [
        "one" + expected_text(gateways, one, 5),
        "two!" + expected_text(gateways, two, 5),
    ]
    assert completion(http, prompt=one, max_tokens=5)["choices"][0]["text"] == expected_text(gateways, one, 5)
    *events, _ = streamed(http, prompt=PROMPT, max_tokens=5, echo=True)
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == PROMPT + expected_text(gateways, encoded(gateways), 5)


@pytest.mark.parametrize("chat", [False, True])
def test_ids_of_the_tokens_of_prompt_and_output(gateways: Gateways, http: httpx.Client, chat: bool) -> None:
    prompt = list(gateways.tokenizer.encode_chat(CHAT) if chat else encoded(gateways))
    tokens = expected_tokens(gateways, prompt, 40)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"model": MODEL, "max_tokens": 40, "n": 2, **({"messages": CHAT} if chat else {"prompt": PROMPT})}
    assert "token_ids" not in http.post(path, json=body).text
    body["return_token_ids"] = True
    whole = http.post(path, json=body).json()
    assert [choice["token_ids"] for choice in whole["choices"]] == [tokens, tokens]
    holders = [whole] if chat else whole["choices"]
    assert [holder["prompt_token_ids"] for holder in holders] == [prompt] * len(holders)
    lines = http.post(path, json=body | {"stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert [token for choice in own for token in choice.get("token_ids", [])] == tokens
    shown = [one["prompt_token_ids"] for one in (events if chat else choices) if "prompt_token_ids" in one]
    assert shown == [prompt] * len(holders)


def test_the_best_of_several_choices(gateways: Gateways, http: httpx.Client) -> None:
    """All choices of the stand-in are alike: those with the smaller seeds are returned, and all are counted."""
    done = completion(http, prompt=["one", PROMPT], max_tokens=5, best_of=4, n=2)
    assert [(choice["index"], choice["text"]) for choice in done["choices"]] == [
        (index, expected_text(gateways, encoded(gateways, text), 5))
        for index, text in enumerate(("one", "one", PROMPT, PROMPT))
    ]
    assert [choice["logprobs"] for choice in done["choices"]] == [None] * 4
    assert done["usage"]["completion_tokens"] == 2 * 4 * 5


# --- chat -------------------------------------------------------------------------------------------------------------


def test_chat(gateways: Gateways, client: openai.OpenAI) -> None:
    prompt = gateways.tokenizer.encode_chat(CHAT)
    done = client.chat.completions.create(model=MODEL, messages=CHAT, max_completion_tokens=40)  # type: ignore[arg-type]
    message = done.choices[0].message
    assert (message.role, message.content) == ("assistant", expected_text(gateways, prompt, 40))
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(prompt)
    *chunks, last = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,  # type: ignore[arg-type]
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(prompt), 40)


def test_chat_goes_on_until_the_model_ends_it(gateways: Gateways, client: openai.OpenAI) -> None:
    tokens = expected_tokens(gateways, gateways.tokenizer.encode_chat(CHAT), MAX_LENGTH)
    done = client.chat.completions.create(model=MODEL, messages=CHAT, extra_body={"spool": {"draft_length": 8}})  # type: ignore[arg-type]
    assert done.choices[0].finish_reason == "stop"
    assert done.usage is not None
    assert done.usage.completion_tokens == len(tokens) > 16
    assert done.choices[0].message.content == gateways.tokenizer.decode(tokens)


def test_parts_of_text_and_developers(gateways: Gateways, client: openai.OpenAI) -> None:
    parts: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
    ]
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hel\nlo"}]
    done = client.chat.completions.create(model=MODEL, messages=parts, max_tokens=8)
    assert done.choices[0].message.content == expected_text(gateways, gateways.tokenizer.encode_chat(plain), 8)


# --- stops ------------------------------------------------------------------------------------------------------------


def test_stop_strings_cut_exactly_and_usage_agrees(gateways: Gateways, http: httpx.Client) -> None:
    cases = stop_cases(gateways)
    assert len(cases) > 20
    for number, (stop, before, count) in enumerate(cases):
        asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "stop": stop}
        if number % 2:
            *events, last = streamed(http, **asked)
            text = "".join(event["choices"][0]["text"] for event in events)
            reason, usage = events[-1]["choices"][0]["finish_reason"], last["usage"]
        else:
            done = completion(http, **asked)
            text, reason, usage = done["choices"][0]["text"], done["choices"][0]["finish_reason"], done["usage"]
        assert (text, reason, usage["completion_tokens"]) == (before, "stop", count), stop
        if number % 4 == 0:
            kept = completion(http, **asked, include_stop_str_in_output=True)
            assert (kept["choices"][0]["text"], kept["usage"]["completion_tokens"]) == (before + stop, count)


@pytest.mark.parametrize("min_tokens", [3, 7, 20])
def test_no_stop_string_in_the_first_tokens(gateways: Gateways, http: httpx.Client, min_tokens: int) -> None:
    tokens = expected_tokens(gateways, encoded(gateways), 40)
    decode = gateways.tokenizer.decode
    early, text = decode(tokens[:min_tokens]), decode(tokens)
    assert text.startswith(early)
    stop = next(letter for letter in early if letter != "\ufffd" and letter in text[len(early) :])
    [choice] = completion(http, max_tokens=40, stop=stop, min_tokens=min_tokens)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop, len(early))], "stop")


def test_stop_token_ids_and_the_models_end(gateways: Gateways, http: httpx.Client) -> None:
    tokens = expected_tokens(gateways, encoded(gateways), 1900)
    done = completion(http, max_tokens=20, stop_token_ids=[tokens[9]])
    [choice], end = done["choices"], tokens.index(tokens[9])
    assert choice["text"] == gateways.tokenizer.decode(tokens[:end])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[9])
    assert done["usage"]["completion_tokens"] == end + 1
    assert len(tokens) < 1900
    ignored = completion(http, max_tokens=len(tokens) + 5, ignore_eos=True, spool={"draft_length": 8})
    assert ignored["usage"]["completion_tokens"] == len(tokens) + 5


# --- seeds, speculation, parameters -----------------------------------------------------------------------------------


def test_seed_is_reported(http: httpx.Client) -> None:
    one, two, given = (http.post("/v1/completions", json={"prompt": PROMPT, **seed}) for seed in ({}, {}, {"seed": -1}))
    assert one.headers["x-spool-seed"] == str(one.json()["usage"]["spool"]["seed"])
    assert one.headers["x-spool-seed"] != two.headers["x-spool-seed"]
    assert given.headers["x-spool-seed"] == str(2**64 - 1)


@pytest.mark.parametrize("spool", [{"speculation": False}, {"draft_length": 0}])
def test_speculation_can_be_turned_off(gateways: Gateways, http: httpx.Client, spool: dict[str, Any]) -> None:
    done = completion(http, max_tokens=30, spool=spool, seed=0)
    assert done["usage"]["spool"] == {"drafted": 0, "accepted": 0, "seed": 0}
    assert done["choices"][0]["text"] == expected_text(gateways, encoded(gateways), 30)


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
    for options, body in ((settings, asked), (settings, {}), (None, {})):
        with gateways.serve(options, recorder) as served, httpx.Client(base_url=served.url, timeout=TIMEOUT) as http:  # type: ignore[arg-type]
            completion(http, **body)
    one, two, defaults, openais = recorder.requests
    assert (one.max_tokens, one.draft_length, one.top_logprobs) == (3, 3, 2)
    assert one.stop_token_ids == {9, *gateways.tokenizer.stop_token_ids}
    assert (one.sampling.temperature, one.sampling.top_p, one.sampling.top_k) == (0.25, 0.9, VOCABULARY)
    assert (one.sampling.min_p, one.sampling.repetition_penalty) == (0.1, 1.25)
    assert (one.sampling.presence_penalty, one.sampling.frequency_penalty) == (1, -1.5)
    assert one.sampling.logit_bias == {7: -100, 8: 2.5}
    assert (one.sampling.seed, two.sampling.seed) == (5, 6)
    assert (defaults.sampling.temperature, defaults.sampling.top_k, defaults.sampling.min_p) == (0.5, 40, 0)
    assert (defaults.max_tokens, defaults.top_logprobs, defaults.draft_length) == (16, None, None)
    assert defaults.deadline_seconds == pytest.approx(settings.limits.timeout_seconds, abs=5)
    assert openais.sampling.temperature == 1


# --- many at once, and clients that go away ---------------------------------------------------------------------------


def test_concurrent_streams_are_complete_and_right(gateways: Gateways, client: openai.OpenAI) -> None:
    barrier = threading.Barrier(16)

    def read(number: int) -> str:
        barrier.wait(LONG)
        stream = client.completions.create(model=MODEL, prompt=[20 + number, 21], max_tokens=50, stream=True)
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(16) as threads:
        texts = list(threads.map(read, range(16)))
    assert texts == [expected_text(gateways, [20 + number, 21], 50) for number in range(16)]


def connected(served: Served, body: dict[str, Any], cut: int | None = None) -> socket.socket:
    """A connection on which the request, or all but its end, has been sent."""
    host, port = served.url.removeprefix("http://").split(":")
    content = json.dumps(body)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    )
    connection = socket.create_connection((host, int(port)))
    connection.sendall(f"{head}\r\n\r\n{content}".encode()[:cut])
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_away_frees_everything(slow: Gateways, slowly_served: Served, stream: bool) -> None:
    with connected(slowly_served, {**THREE, "stream": stream}) as connection:
        load = f"{slowly_served.url}/load"
        wait_until(lambda: httpx.get(load, timeout=TIMEOUT).json()["server_load"] == 3, "three sequences")
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    slow.wait_until_idle()


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
