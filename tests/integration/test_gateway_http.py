"""OpenAI's API from outside: its own client against a real server, over workers whose output is known beforehand."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
from pydantic import SecretStr

from scheduler.config import SchedulerConfig
from services.backend import BackendUnavailableError, GenerationRequest, LoadFigures, ModelInfo
from services.gateway.settings import GatewaySettings, SamplingDefaults
from services.local_backend import LocalBackend, LocalStream
from tests.stand_in_worker import MAX_LENGTH, ROW_FAILS, VOCABULARY, continuation
from tests.support.gateway import MODEL, Gateways, Served, stand_in_gateways
from tests.support.waiting import LONG, wait_until

PROMPT = "once upon a time"
TIMEOUT = 2 * LONG
CHAT: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]

ENDLESS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "spool": {"speculation": False}}
THREE = {**ENDLESS, "n": 3}

# A step takes so long that a sequence of ENDLESS outlasts every wait: only its end ahead of time frees anything.
STEP_SECONDS = 0.08
assert STEP_SECONDS * ENDLESS["max_tokens"] > LONG


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    gateways = stand_in_gateways(tmp_path_factory.mktemp("model"), step_seconds=0.001)
    yield gateways
    gateways.close()


@pytest.fixture(scope="module")
def served(gateways: Gateways) -> Iterator[Served]:
    with gateways.serve() as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=TIMEOUT) as client:
        yield client


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    gateways = stand_in_gateways(tmp_path_factory.mktemp("slow"), step_seconds=STEP_SECONDS)
    yield gateways
    gateways.close()


@pytest.fixture(scope="module")
def slowly_served(slow: Gateways) -> Iterator[Served]:
    with slow.serve() as served:
        yield served


@pytest.fixture(autouse=True)
def _nothing_stays_behind(gateways: Gateways) -> Iterator[None]:
    yield
    gateways.wait_until_idle()


def expected_tokens(gateways: Gateways, prompt: Sequence[int], count: int) -> list[int]:
    """What the model says, up to its own end."""
    tokens = continuation(prompt, count)
    ends = [place for place, token in enumerate(tokens) if token in gateways.tokenizer.stop_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def expected_text(gateways: Gateways, prompt: Sequence[int], count: int) -> str:
    return gateways.tokenizer.decode(expected_tokens(gateways, prompt, count))


def encoded(gateways: Gateways, text: str = PROMPT) -> list[int]:
    return gateways.tokenizer.encode(text)


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
        # What stands at the offset is the token's text, unless it is part of a character or has none.
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
    assert chunks[-1].usage == done.usage.model_copy(update={"spool": chunks[-1].usage.to_dict()["spool"]})  # type: ignore[union-attr]


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


def stop_cases(gateways: Gateways) -> list[tuple[str, str, int]]:
    """Stop strings from anywhere in the text, what is left of it, and the tokens up to the one that completes them."""
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


class Recorder(LocalBackend):
    """Keeps what the gateway asked for."""

    def __init__(self, gateways: Gateways) -> None:
        super().__init__(gateways.service)
        self.requests: list[GenerationRequest] = []

    async def submit(self, request: GenerationRequest) -> LocalStream:
        self.requests.append(request)
        return await super().submit(request)


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


# --- the rest of the routes -------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).to_dict()["max_model_len"] == MAX_LENGTH
    with pytest.raises(openai.NotFoundError, match="model 'other' does not exist, there is stand-in"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.completions.create(model="gpt", prompt="a")


def test_names_for_the_model(gateways: Gateways) -> None:
    with (
        gateways.serve(GatewaySettings(model_names=("demo", "org/demo"))) as served,
        httpx.Client(base_url=served.url, timeout=TIMEOUT) as http,
    ):
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["demo", "org/demo"]
        assert http.get("/v1/models/org/demo").json()["id"] == "org/demo"
        assert http.post("/v1/completions", json={"prompt": "a"}).json()["model"] == "demo"
        assert http.post("/v1/completions", json={"prompt": "a", "model": MODEL}).status_code == 404


def test_tokenize_and_detokenize(gateways: Gateways, http: httpx.Client) -> None:
    text = http.post("/tokenize", json={"prompt": "the é", "return_token_strs": True}).json()
    assert text["tokens"] == gateways.tokenizer.encode("the é")
    assert text["count"] == len(text["tokens"])
    assert text["max_model_len"] == MAX_LENGTH
    assert text["token_strs"] == ["t", "he", " ", "\\xc3", "\\xa9"]
    assert http.post("/detokenize", json={"tokens": text["tokens"]}).json() == {"prompt": "the é"}
    chat = http.post("/tokenize", json={"messages": CHAT}).json()
    assert chat["tokens"] == gateways.tokenizer.encode_chat(CHAT)
    assert http.post("/tokenize", json={"prompt": "a", "messages": CHAT}).status_code == 400
    assert http.post("/detokenize", json={"tokens": [VOCABULARY]}).status_code == 400


def test_health_load_and_version(http: httpx.Client) -> None:
    assert http.get("/health").json() == http.get("/ping").json() == {"status": "ok"}
    load = http.get("/load").json()
    assert load["server_load"] == load["running"] == load["waiting"] == 0
    assert {worker["role"] for worker in load["workers"]} == {"draft", "target"}
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", http.get("/version").json()["version"])


def test_metrics(gateways: Gateways) -> None:
    with gateways.serve() as served, httpx.Client(base_url=served.url, timeout=TIMEOUT) as http:
        done = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 20, "n": 2}).json()
        assert http.post("/v1/completions", json={"prompt": ""}).status_code == 400
        response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    assert float(samples["spool_prompt_tokens_total"]) == done["usage"]["prompt_tokens"]
    assert float(samples["spool_generation_tokens_total"]) == 40
    assert float(samples['spool_request_success_total{finished_reason="length"}']) == 2
    assert float(samples['spool_request_failure_total{kind="invalid"}']) == 1
    assert float(samples["spool_delivered_draft_tokens_total"]) == done["usage"]["spool"]["drafted"]
    assert float(samples["spool_delivered_accepted_tokens_total"]) == done["usage"]["spool"]["accepted"]
    assert float(samples["spool_time_to_first_token_seconds_count"]) == 2
    assert float(samples["spool_num_requests_running"]) == 0


# --- errors -----------------------------------------------------------------------------------------------------------


def message_of(response: httpx.Response) -> str:
    """The message of an error in OpenAI's shape."""
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return str(error["message"])


BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "prompt", "prompt is missing"),
    ({"prompt": None}, "prompt", "prompt is None, must be text"),
    ({"prompt": ""}, "prompt", "prompt is empty, must have at least 1 token"),
    ({"prompt": []}, "prompt", r"prompt is \[\]"),
    ({"prompt": ["a", 1]}, "prompt", "prompt holds 'a' at place 0, must be token ids"),
    ({"prompt": ["a", ""]}, "prompt", r"prompt\[1\] is empty"),
    ({"prompt": [1, -1]}, "prompt", r"prompt\[1\] is -1, must be a token id between 0 and 999"),
    ({"prompt": [VOCABULARY]}, "prompt", r"prompt\[0\] is 1000, must be a token id between 0 and 999"),
    ({"prompt": [10**40]}, "prompt", r"prompt\[0\] is 10000"),
    ({"prompt": [True]}, "prompt", "holds True"),
    ({"prompt": "\ud800"}, "prompt", "half a surrogate pair"),
    ({"prompt": "A" * 3000}, "prompt", "prompt has 3000 tokens.* makes 3001; the model's limit is 2000"),
    ({"prompt": "a", "max_tokens": 5000}, "prompt", "1 tokens.* max_tokens of 5000 makes 5001; .* limit is 2000"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens is 0, must be at least 1"),
    ({"prompt": "a", "max_tokens": 10**30}, "prompt", "makes 10000000"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "max_tokens is '5', must be a valid integer"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5"),
    ({"prompt": "a", "n": 0}, "n", "n is 0, must be between 1 and 128"),
    ({"prompt": ["a"] * 100, "n": 2}, "n", "make 200 sequences, must be at most 128"),
    ({"prompt": "a", "temperature": -0.5}, "temperature", "temperature is -0.5, must be between 0 and 100"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature", "temperature is nan"),
    ({"prompt": "a", "temperature": 10**400}, "temperature", "temperature is 1000"),
    ({"prompt": "a", "top_p": float("inf")}, "top_p", "top_p is inf"),
    ({"prompt": "a", "top_p": 0}, "top_p", "top_p is 0.0, must be above 0"),
    ({"prompt": "a", "top_k": -2}, "top_k", "top_k is -2, must be 0"),
    ({"prompt": "a", "min_p": 2}, "min_p", "min_p is 2.0, must be between 0 and 1"),
    ({"prompt": "a", "presence_penalty": 3}, "presence_penalty", "must be between -2 and 2"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "must be above 0"),
    ({"prompt": "a", "seed": 2**64}, "seed", "seed is 18446744073709551616, must be between"),
    ({"prompt": "a", "stop": ["", "b"]}, "stop", r"stop\[0\] has 0 characters"),
    ({"prompt": "a", "stop": ["b"] * 17}, "stop", "stop has 17 strings, must have at most 16"),
    ({"prompt": "a", "stop": [1]}, "stop", r"stop is \[1\]"),
    ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids", r"stop_token_ids\[0\] is -1"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "has the key 'x'"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias", "of token 1 is 101, must be between -100 and 100"),
    ({"prompt": "a", "logit_bias": {"1000": 1}}, "logit_bias", "names token id 1000, must be between 0 and 999"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "logprobs is 21, must be between 0 and 20"),
    ({"prompt": "a", "logprobs": 1, "echo": True}, "logprobs", "not supported"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "suffix is not supported"),
    ({"prompt": "a", "best_of": 3}, "best_of", "best_of is 3, must equal n"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"prompt": "a", "spool": {"draft_length": -1}}, "spool.draft_length", "draft_length is -1"),
    ({"prompt": "a", "spool": {"draft_length": 2, "speculation": False}}, "spool", "with speculation off"),
    ({"prompt": "a", "spool": {"speed": 2}}, "spool.speed", "not a known field"),
    ({"prompt": "a", "unknown": 2}, "unknown", "unknown is not a known field"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD_COMPLETIONS)
def test_bad_completions(http: httpx.Client, body: dict[str, Any], param: str | None, message: str) -> None:
    content = json.dumps(body).encode()
    response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert re.search(message, message_of(response)), message_of(response)
    assert response.json()["error"]["param"] == param


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "messages has 0 entries"),
    ({"messages": [{"role": "pirate", "content": "arr"}]}, "messages.0.role", "'pirate'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "is missing"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "is None, must be a text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "at place 0, must be"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "no tools here"),
    ({"messages": CHAT, "tools": [{"type": "function"}]}, "tools", "tools is not supported"),
    ({"messages": CHAT, "response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "is 21, must be between 0 and 20"),
    ({"messages": CHAT, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
    ({"messages": CHAT, "max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0"),
    ({"messages": CHAT, "max_tokens": 4000}, "messages", "max_tokens of 4000 makes"),
    ({"messages": CHAT, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "no option of a template"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD_CHATS)
def test_bad_chats(http: httpx.Client, body: dict[str, Any], param: str, message: str) -> None:
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert re.search(message, message_of(response)), message_of(response)
    assert response.json()["error"]["param"] == param


def test_harmless_fields_of_other_servers_are_taken(http: httpx.Client) -> None:
    body = {
        "messages": CHAT,
        "max_tokens": 2,
        "user": "me",
        "store": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "metadata": {"a": "b"},
        "top_k": -1,
        "stop": None,
        "logit_bias": None,
        "stream_options": None,
    }
    assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body is empty"),
        (b"{", "not JSON"),
        (b"null", "must be a JSON object"),
        (b"[]", "must be a JSON object"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"prompt": "\xff"}', "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"prompt": [1' + b"0" * 5000 + b"]}", "cannot be read as JSON"),
        (b'{"prompt": "a", "\\ud800": 1}', "half a surrogate pair"),
        (b'{"prompt": "a", "n": NaN}', "n is nan"),
    ],
)
def test_bodies_that_are_no_request(http: httpx.Client, content: bytes, message: str) -> None:
    response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert re.search(message, message_of(response)), message_of(response)


def test_other_content_types_are_refused(http: httpx.Client) -> None:
    response = http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert response.status_code == 400
    assert "content-type application/json" in message_of(response)


def test_large_bodies_are_refused_and_the_server_goes_on(http: httpx.Client) -> None:
    def drip() -> Iterator[bytes]:
        for _ in range(160):
            yield b" " * 65536

    for content in (b" " * 10_000_000, drip()):
        response = http.post("/v1/completions", content=content)
        assert response.status_code == 413
        assert "must have at most 4194304" in message_of(response)
    assert http.get("/health").status_code == 200


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    assert http.get("/v2/models").status_code == 404
    assert "GET /v2/models" in message_of(http.get("/v2/models"))
    response = http.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert message_of(response)


def test_request_ids(http: httpx.Client) -> None:
    assert http.get("/ping", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert re.fullmatch("[0-9a-f]{32}", http.get("/nowhere").headers["x-request-id"])
    assert len(http.get("/ping", headers={"x-request-id": "x" * 500}).headers["x-request-id"]) == 32


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", ""])
def test_bad_deadlines(http: httpx.Client, value: str) -> None:
    response = http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-timeout-seconds": value})
    assert response.status_code == 400
    assert "x-request-timeout-seconds" in message_of(response)


def test_deadline(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "spool": {"speculation": False}}
    response = http.post("/v1/completions", json=body, headers={"x-request-timeout-seconds": "0.2"})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"


def test_error_in_a_stream_is_an_event_and_the_stream_ends(slowly_served: Served) -> None:
    # Enough for the stream to begin, and not for it to end.
    limit = {"x-request-timeout-seconds": "2"}
    url = f"{slowly_served.url}/v1/completions"
    response = httpx.post(url, json={**ENDLESS, "stream": True}, headers=limit, timeout=TIMEOUT)
    assert response.status_code == 200
    events = response.text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert events[-2:] == ["data: [DONE]", ""]
    with openai.OpenAI(base_url=f"{slowly_served.url}/v1", api_key="x", default_headers=limit) as client:
        stream = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
        )
        with pytest.raises(openai.APIError, match="not finished within its"):
            list(stream)


def test_sequence_that_fails(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": [ROW_FAILS]})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "sequence_failed"
    assert "unlucky token" in message_of(response)


def test_failure_of_one_choice_ends_all(http: httpx.Client) -> None:
    body = {"prompt": [[20, 21], [ROW_FAILS]], "max_tokens": 1900, "ignore_eos": True, "stream": True}
    response = http.post("/v1/completions", json=body)
    assert '"code":"sequence_failed"' in response.text
    assert response.text.endswith("data: [DONE]\n\n")


class NoTarget(LocalBackend):
    async def load(self) -> LoadFigures:
        return LoadFigures(0, 0, ())


class NoScheduler(LocalBackend):
    async def load(self) -> LoadFigures:
        raise BackendUnavailableError("the scheduler does not answer")

    async def model(self) -> ModelInfo:
        raise BackendUnavailableError("the scheduler does not answer")


@pytest.mark.parametrize("kind", [NoTarget, NoScheduler])
def test_nobody_to_generate(gateways: Gateways, kind: type[LocalBackend]) -> None:
    with (
        gateways.serve(backend=kind(gateways.service)) as served,
        httpx.Client(base_url=served.url, timeout=TIMEOUT) as http,
    ):
        response = http.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == http.get("/health").status_code == 503
        assert response.headers["retry-after"] == "1"
        assert message_of(response)
        assert http.get("/ping").status_code == 200
        assert "spool_num_requests_running" in http.get("/metrics").text


def test_full_queue(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = SchedulerConfig(window=1, max_queued_sequences=1)
    gateways = stand_in_gateways(tmp_path_factory.mktemp("small"), config, step_seconds=0.01)
    try:
        settings = GatewaySettings(retry_after_seconds=3)
        with gateways.serve(settings) as served, httpx.Client(base_url=served.url, timeout=TIMEOUT) as http:
            response = http.post("/v1/completions", json={"prompt": "a", "n": 3, "max_tokens": 1000})
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "queue_full"
            # Those that were let in before are cancelled.
            gateways.wait_until_idle()
            assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    finally:
        gateways.close()


# --- keys -------------------------------------------------------------------------------------------------------------


def test_every_route_but_health_and_ping_takes_a_key(gateways: Gateways) -> None:
    keys = (SecretStr("first-key"), SecretStr("second-key"))
    with (
        gateways.serve(GatewaySettings(api_keys=keys)) as served,
        httpx.Client(base_url=served.url, timeout=TIMEOUT) as http,
    ):
        described = http.get("/openapi.json", headers={"authorization": "Bearer first-key"}).json()
        routes = [(method, path) for path, methods in described["paths"].items() for method in methods]
        routes += [("get", path) for path in ("/docs", "/redoc", "/openapi.json", "/nowhere", "/health/", "//health")]
        assert len(routes) > 15
        for method, path in routes:
            path = path.replace("{model}", "x")
            response = http.request(method, path)
            if path in ("/health", "/ping"):
                assert response.status_code == 200
                continue
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "missing_api_key"
            assert response.headers.get_list("www-authenticate")[0] == "Bearer"
        for value in (
            "Bearer",
            "Bearer first-kez",
            "Bearer first-key2",
            "Basic first-key",
            "first-key",
            "é",
        ):
            headers = {"authorization": value.encode()}
            assert http.get("/v1/models", headers=headers).status_code == 401, value  # type: ignore[arg-type]
        two = [("authorization", "Bearer first-key"), ("authorization", "Bearer wrong")]
        assert http.get("/v1/models", headers=two).status_code == 401
        for key in ("first-key", "second-key"):
            with openai.OpenAI(base_url=f"{served.url}/v1", api_key=key) as client:
                assert client.completions.create(model=MODEL, prompt="a").choices
        with (
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong") as client,
            pytest.raises(openai.AuthenticationError, match="not known here"),
        ):
            client.models.list()


# --- clients that go away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_away_frees_everything(slow: Gateways, slowly_served: Served, stream: bool) -> None:
    body = json.dumps({**THREE, "stream": stream}).encode()
    host, port = slowly_served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        load = f"{slowly_served.url}/load"
        wait_until(lambda: httpx.get(load, timeout=TIMEOUT).json()["server_load"] == 3, "three sequences")
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    slow.wait_until_idle()


def test_closing_the_openai_stream_frees_everything(slow: Gateways, slowly_served: Served) -> None:
    with openai.OpenAI(base_url=f"{slowly_served.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"ignore_eos": True, "spool": {"speculation": False}}
        stream = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=ENDLESS["max_tokens"], stream=True, extra_body=extra
        )
        next(iter(stream))
        stream.close()
    slow.wait_until_idle()


def test_many_cancelled_at_any_moment(slow: Gateways, slowly_served: Served) -> None:
    host, port = slowly_served.url.removeprefix("http://").split(":")

    def cancel(number: int) -> None:
        body = json.dumps({**THREE, "stream": number % 2 == 0}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall((f"{head}\r\n\r\n".encode() + body)[: None if number % 5 else -1])
            end = time.monotonic() + number % 7 * 0.01
            while (left := end - time.monotonic()) > 0:
                connection.settimeout(left)
                with suppress(TimeoutError):
                    connection.recv(65536)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(cancel, range(100)))
    slow.wait_until_idle()


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
