"""Completions and chat with OpenAI's own client: texts, logprobs, stops, seeds, many at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from services.gateway.settings import GatewaySettings, SamplingDefaults
from tests.integration.gateway.expected import (
    CHAT,
    PROMPT,
    TIMEOUT,
    Recorder,
    encoded,
    expected_text,
    expected_tokens,
    stop_cases,
)
from tests.support.gateway import MODEL, Gateways
from tests.support.stand_in_worker import MAX_LENGTH, VOCABULARY
from tests.support.waiting import LONG

# --- completions ------------------------------------------------------------------------------------------------------


def test_completion_is_the_models_own(gateways: Gateways, client: openai.OpenAI) -> None:
    prompt = encoded(gateways)
    done = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=60)
    assert done.choices[0].text == expected_text(gateways, prompt, 60)
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(prompt), 60)
    assert done.usage.total_tokens == len(prompt) + 60
    spool = done.usage.to_dict()["spool"]
    assert 0 < spool["accepted"] < spool["drafted"]
    assert done.object == "text_completion"
    assert done.id.startswith("cmpl-")


def test_streamed_completion_is_the_same(gateways: Gateways, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=60, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected_text(gateways, encoded(gateways), 60)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 60
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("echo", [False, True])
def test_usage_in_every_event(client: openai.OpenAI, echo: bool) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=60, stream=True, stream_options=options, echo=echo
    )
    usages = [chunk.usage for chunk in stream if chunk.usage is not None]
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 60
    assert len(counts) > 10
    assert {usage.total_tokens - usage.completion_tokens for usage in usages} == {usages[0].prompt_tokens}


def test_usage_says_what_became_of_draft_tokens(client: openai.OpenAI) -> None:
    usage = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=60).usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    spool, details = usage.to_dict()["spool"], usage.completion_tokens_details
    assert details.accepted_prediction_tokens == spool["accepted"] > 0
    assert details.rejected_prediction_tokens == spool["drafted"] - spool["accepted"] > 0


def test_text_continuations_are_short_unless_asked_for_more(client: openai.OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt=PROMPT)
    assert done.usage is not None
    assert done.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices(gateways: Gateways, client: openai.OpenAI, stream: bool) -> None:
    texts = ["one", "two", "three"]
    arguments: dict[str, Any] = {"model": MODEL, "prompt": texts, "n": 2, "max_tokens": 10, "seed": 7}
    found = [""] * 6
    if stream:
        for chunk in client.completions.create(**arguments, stream=True):
            for choice in chunk.choices:
                found[choice.index] += choice.text
    else:
        done = client.completions.create(**arguments)
        assert [choice.index for choice in done.choices] == list(range(6))
        found = [choice.text for choice in done.choices]
        assert done.usage is not None
        assert done.usage.prompt_tokens == sum(len(encoded(gateways, text)) for text in texts)
        assert done.usage.completion_tokens == 60
        assert done.usage.to_dict()["spool"]["seed"] == 7
    assert found == [expected_text(gateways, encoded(gateways, text), 10) for text in texts for _ in range(2)]


def test_prompts_as_token_ids_and_echo(gateways: Gateways, client: openai.OpenAI) -> None:
    one, two = encoded(gateways, "one"), encoded(gateways, "two!")
    done = client.completions.create(model=MODEL, prompt=[one, two], max_tokens=5, echo=True)
    assert [choice.text for choice in done.choices] == [
        "one" + expected_text(gateways, one, 5),
        "two!" + expected_text(gateways, two, 5),
    ]
    single = client.completions.create(model=MODEL, prompt=one, max_tokens=5)
    assert single.choices[0].text == expected_text(gateways, one, 5)
    streamed = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, echo=True, stream=True)
    text = "".join(chunk.choices[0].text for chunk in streamed)
    assert text == PROMPT + expected_text(gateways, encoded(gateways), 5)


def test_completion_logprobs(gateways: Gateways, client: openai.OpenAI) -> None:
    tokens = expected_tokens(gateways, encoded(gateways), 12)
    done = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, logprobs=3)
    found = done.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs == [-0.25] * 12
    assert [len(top) for top in found.top_logprobs or []] == [3] * 12
    assert found.tokens is not None
    assert found.text_offset is not None
    for place, token in enumerate(tokens):
        text = gateways.tokenizer.decode([token], skip_special_tokens=False)
        assert found.tokens[place] == text or "\ufffd" in text
        # The text at the offset is the token's, unless the token is part of a character or has no text.
        if "\ufffd" not in gateways.tokenizer.decode(tokens[: place + 1]) and token < 932:
            assert done.choices[0].text[found.text_offset[place] :].startswith(text)
    chunks = list(client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, logprobs=3, stream=True))
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert [token for part in streamed for token in part.tokens or []] == found.tokens
    assert [offset for part in streamed for offset in part.text_offset or []] == found.text_offset


# --- chat -------------------------------------------------------------------------------------------------------------


def test_chat(gateways: Gateways, client: openai.OpenAI) -> None:
    prompt = gateways.tokenizer.encode_chat(CHAT)
    done = client.chat.completions.create(model=MODEL, messages=CHAT, max_completion_tokens=40)  # type: ignore[arg-type]
    choice = done.choices[0]
    assert choice.message.content == expected_text(gateways, prompt, 40)
    assert choice.message.role == "assistant"
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(prompt)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,  # type: ignore[arg-type]
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    usage = chunks[-1].usage
    assert usage is not None
    # What was drafted depends on when steps were ready, and what was cached on who asked before.
    varying = {"spool": usage.to_dict()["spool"], "completion_tokens_details": usage.completion_tokens_details}
    varying["prompt_tokens_details"] = usage.prompt_tokens_details
    assert usage == done.usage.model_copy(update=varying)


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


def test_chat_logprobs(gateways: Gateways, client: openai.OpenAI) -> None:
    tokens = expected_tokens(gateways, gateways.tokenizer.encode_chat(CHAT), 20)
    arguments: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 20, "logprobs": True}
    done = client.chat.completions.create(**arguments, top_logprobs=2)
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode(errors="replace") == (
        gateways.tokenizer.decode(tokens, skip_special_tokens=False)
    )
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 20
    assert all(entry.top_logprobs[0].token == entry.token for entry in logprobs.content)
    chunks = list(client.chat.completions.create(**arguments, stream=True))
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert [entry.token for part in streamed for entry in part.content or []] == [
        entry.token for entry in logprobs.content
    ]


# --- stops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_exactly_and_usage_agrees(gateways: Gateways, client: openai.OpenAI, stream: bool) -> None:
    cases = stop_cases(gateways)
    assert len(cases) > 20

    def check(case: tuple[str, str, int]) -> int:
        stop, before, count = case
        arguments: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "stop": [stop, "never"]}
        if stream:
            chunks = list(client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
            text = "".join(chunk.choices[0].text for chunk in chunks[:-1])
            reason, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
        else:
            done = client.completions.create(**arguments)
            text, reason, usage = done.choices[0].text, done.choices[0].finish_reason, done.usage
        assert (text, reason) == (before, "stop"), stop
        assert usage is not None
        assert usage.completion_tokens == count, stop
        return int(usage.to_dict()["spool"]["accepted"])

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(check, cases)) > 0


def test_stop_strings_are_kept_where_asked_for(gateways: Gateways, client: openai.OpenAI) -> None:
    for stop, before, count in stop_cases(gateways)[::4]:
        arguments: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "stop": stop}
        done = client.completions.create(**arguments, extra_body={"include_stop_str_in_output": True})
        assert done.usage is not None
        assert (done.choices[0].text, done.choices[0].finish_reason) == (before + stop, "stop")
        assert done.usage.completion_tokens == count


@pytest.mark.parametrize("min_tokens", [3, 7, 20])
def test_no_stop_string_in_the_first_tokens(gateways: Gateways, client: openai.OpenAI, min_tokens: int) -> None:
    tokens = expected_tokens(gateways, encoded(gateways), 40)
    decode = gateways.tokenizer.decode
    early, text = decode(tokens[:min_tokens]), decode(tokens)
    assert text.startswith(early)
    stop = next(letter for letter in early if letter != "\ufffd" and letter in text[len(early) :])
    done = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=40, stop=stop, extra_body={"min_tokens": min_tokens}
    )
    assert stop in early
    assert done.choices[0].text == text[: text.index(stop, len(early))]
    assert done.choices[0].finish_reason == "stop"


def test_a_least_length_beyond_the_usual_one(client: openai.OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"min_tokens": 50})
    assert done.usage is not None
    assert done.usage.completion_tokens == 50


def test_stop_token_ids(gateways: Gateways, client: openai.OpenAI) -> None:
    tokens = expected_tokens(gateways, encoded(gateways), 20)
    done = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=20, extra_body={"stop_token_ids": [tokens[9]]}
    )
    end = tokens.index(tokens[9])
    assert done.choices[0].text == gateways.tokenizer.decode(tokens[:end])
    assert done.choices[0].finish_reason == "stop"
    assert done.usage is not None
    assert done.usage.completion_tokens == end + 1
    assert done.choices[0].to_dict()["stop_reason"] == tokens[9]


def test_model_end_can_be_ignored(gateways: Gateways, client: openai.OpenAI) -> None:
    prompt = encoded(gateways)
    end = len(expected_tokens(gateways, prompt, 1900))
    assert end < 1900
    done = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=end + 5, extra_body={"ignore_eos": True, "spool": {"draft_length": 8}}
    )
    assert done.usage is not None
    assert done.usage.completion_tokens == end + 5


# --- seeds, speculation -----------------------------------------------------------------------------------------------


def test_seed_is_reported(http: httpx.Client) -> None:
    one = http.post("/v1/completions", json={"prompt": PROMPT})
    two = http.post("/v1/completions", json={"prompt": PROMPT})
    assert one.headers["x-spool-seed"] == str(one.json()["usage"]["spool"]["seed"])
    assert one.headers["x-spool-seed"] != two.headers["x-spool-seed"]
    given = http.post("/v1/completions", json={"prompt": PROMPT, "seed": -1})
    assert given.headers["x-spool-seed"] == str(2**64 - 1)


@pytest.mark.parametrize("spool", [{"speculation": False}, {"draft_length": 0}])
def test_speculation_can_be_turned_off(gateways: Gateways, http: httpx.Client, spool: dict[str, Any]) -> None:
    done = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 30, "spool": spool}).json()
    assert done["usage"]["spool"] | {"seed": 0} == {"drafted": 0, "accepted": 0, "seed": 0}
    assert done["choices"][0]["text"] == expected_text(gateways, encoded(gateways), 30)


def test_parameters_reach_the_scheduler(gateways: Gateways) -> None:
    recorder = Recorder(gateways)
    settings = GatewaySettings(sampling=SamplingDefaults(temperature=0.5, top_p=0.9, top_k=40))
    with gateways.serve(settings, recorder) as served, httpx.Client(base_url=served.url, timeout=TIMEOUT) as http:
        body = {
            "prompt": PROMPT,
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
        assert http.post("/v1/completions", json=body).is_success
        assert http.post("/v1/completions", json={"prompt": PROMPT}).is_success
    one, two, three = recorder.requests
    assert (one.max_tokens, one.draft_length, one.top_logprobs) == (3, 3, 2)
    assert one.stop_token_ids == {9, *gateways.tokenizer.stop_token_ids}
    assert (one.sampling.temperature, one.sampling.top_p, one.sampling.top_k) == (0.25, 0.9, VOCABULARY)
    assert (one.sampling.min_p, one.sampling.repetition_penalty) == (0.1, 1.25)
    assert (one.sampling.presence_penalty, one.sampling.frequency_penalty) == (1, -1.5)
    assert one.sampling.logit_bias == {7: -100, 8: 2.5}
    assert (one.sampling.seed, two.sampling.seed) == (5, 6)
    assert (three.sampling.temperature, three.sampling.top_k, three.sampling.min_p) == (0.5, 40, 0)
    assert (three.max_tokens, three.top_logprobs, three.draft_length) == (16, None, None)
    assert three.deadline_seconds == pytest.approx(settings.limits.timeout_seconds, abs=5)


def test_temperature_is_openais_unless_the_model_says_otherwise(gateways: Gateways) -> None:
    recorder = Recorder(gateways)
    with gateways.serve(backend=recorder) as served, httpx.Client(base_url=served.url, timeout=TIMEOUT) as http:
        assert http.post("/v1/completions", json={"prompt": PROMPT}).is_success
    assert recorder.requests[0].sampling.temperature == 1


# --- many at once -----------------------------------------------------------------------------------------------------


def test_concurrent_streams_are_complete_and_right(gateways: Gateways, client: openai.OpenAI) -> None:
    barrier = threading.Barrier(16)

    def read(number: int) -> str:
        barrier.wait(LONG)
        stream = client.completions.create(model=MODEL, prompt=[20 + number, 21], max_tokens=50, stream=True)
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(16) as threads:
        texts = list(threads.map(read, range(16)))
    assert texts == [expected_text(gateways, [20 + number, 21], 50) for number in range(16)]
