"""What is said of prompts: their log probabilities, beside an echo and in vLLM's form, and the best of several
choices."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import openai
import pytest

from scheduler.messages import TokenLogprobs
from services.gateway.token_strings import TokenStrings
from spool_client.v1 import generation_pb2 as pb
from spool_client.v1 import generation_pb2_grpc
from tests.integration.gateway.expected import CHAT, PROMPT, encoded, expected_text, expected_tokens
from tests.support.gateway import MODEL, Gateways, Served
from tests.support.stand_in_worker import prompt_logprobs
from tests.support.waiting import LONG

LONG_PROMPT = "the cat sat on the mat and the dog on the log, " * 8
"""Of more tokens than a prefill chunk."""


def texts(gateways: Gateways, tokens: list[int]) -> list[str]:
    strings = TokenStrings(gateways.tokenizer)
    return [strings.of(token).text for token in tokens]


def shape(gateways: Gateways, entries: list[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """vLLM's form: by token id, the likeliest with their rank."""
    found: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)]
        if entry.token_id not in dict(entry.top):
            ranked.append((entry.token_id, entry.logprob, None))
        found.append(
            {
                str(token): {"logprob": logprob, "rank": rank, "decoded_token": texts(gateways, [token])[0]}
                for token, logprob, rank in ranked
            }
        )
    return found


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_echo_with_logprobs(gateways: Gateways, client: openai.OpenAI, max_tokens: int, as_tokens: bool) -> None:
    """As evaluation harnesses ask for log-likelihoods; of prompts shorter and longer than a chunk at once."""
    prompts = [PROMPT, LONG_PROMPT, "a"]
    given: Any = [encoded(gateways, text) for text in prompts] if as_tokens else prompts
    done = client.completions.create(model=MODEL, prompt=given, max_tokens=max_tokens, echo=True, logprobs=2)
    for choice, text in zip(done.choices, prompts, strict=True):
        tokens = encoded(gateways, text)
        output = expected_tokens(gateways, tokens, max_tokens) if max_tokens else []
        scores = prompt_logprobs(tokens, 2)
        assert choice.text == text + gateways.tokenizer.decode(output)
        assert choice.finish_reason == "length"
        found = choice.logprobs
        assert found is not None
        assert found.tokens == texts(gateways, [*tokens, *output])
        assert found.token_logprobs == [None, *(entry.logprob for entry in scores), *[-0.25] * len(output)]
        assert found.top_logprobs is not None
        assert found.top_logprobs[0] is None
        assert all(len(top) == 2 for top in found.top_logprobs[1:])
        assert found.text_offset is not None
        assert len(found.text_offset) == len(tokens) + len(output)
        for offset, token in zip(found.text_offset, texts(gateways, tokens), strict=False):
            assert choice.text[offset:].startswith(token)
    assert done.usage is not None
    assert done.usage.completion_tokens == 3 * max_tokens
    assert done.usage.prompt_tokens == sum(len(encoded(gateways, text)) for text in prompts)


def test_streamed_echo_with_logprobs(gateways: Gateways, client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, echo=True, logprobs=1).choices[0]
    chunks = list(
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, echo=True, logprobs=1, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert chunks[0].choices[0].text.startswith(PROMPT)
    assert whole.logprobs is not None
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert [token for part in parts for token in part.tokens or []] == whole.logprobs.tokens
    assert [value for part in parts for value in part.token_logprobs or []] == whole.logprobs.token_logprobs
    assert [offset for part in parts for offset in part.text_offset or []] == whole.logprobs.text_offset


def test_prompt_logprobs_in_the_form_of_vllm(gateways: Gateways, http: httpx.Client) -> None:
    """Also beside an echo that shows another number of likeliest tokens."""
    tokens = encoded(gateways)
    body = {"prompt": [PROMPT, LONG_PROMPT], "max_tokens": 2, "prompt_logprobs": 1, "logprobs": 3, "echo": True}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert choices[0]["prompt_logprobs"] == shape(gateways, prompt_logprobs(tokens, 1))
    assert choices[1]["prompt_logprobs"] == shape(gateways, prompt_logprobs(encoded(gateways, LONG_PROMPT), 1))
    assert [len(top or {}) for top in choices[0]["logprobs"]["top_logprobs"]] == [0] + [3] * (len(tokens) + 1)
    chat = http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 2, "prompt_logprobs": 0}).json()
    assert chat["prompt_logprobs"] == shape(gateways, prompt_logprobs(gateways.tokenizer.encode_chat(CHAT), 0))
    assert "prompt_logprobs" not in http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 2}).json()


def test_prompt_logprobs_over_grpc(gateways: Gateways, served: Served) -> None:
    expected = prompt_logprobs(encoded(gateways), 2)
    request = pb.GenerateRequest(text=PROMPT, max_tokens=5, prompt_logprobs=2, n=2)
    with grpc.insecure_channel(served.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        whole = stub.Generate(request, timeout=LONG).choices
        streamed = [message.choice for message in stub.GenerateStream(request, timeout=LONG)]
    first = [choice for choice in streamed if choice.prompt_logprobs]
    assert sorted(choice.index for choice in first) == [0, 1]
    for choice in [*whole, *first]:
        assert [(one.chosen.token_id, one.chosen.logprob) for one in choice.prompt_logprobs] == [
            (entry.token_id, entry.logprob) for entry in expected
        ]
        assert [len(one.top) for one in choice.prompt_logprobs] == [2] * len(expected)


def test_tokens_of_the_prompt_that_were_cached(gateways: Gateways, http: httpx.Client) -> None:
    """Pages of four tokens; the last token is computed anew. A scored prompt is computed whole."""
    prompt = "a prompt that no other test has sent before"
    count = len(encoded(gateways, prompt))
    found = []
    for more in ({}, {}, {"n": 3}, {"prompt_logprobs": 0}, {"stream": True}):
        body = {"prompt": prompt, "max_tokens": 2, **more}
        if "stream" in more:
            body["stream_options"] = {"include_usage": True}
            last = http.post("/v1/completions", json=body).text.split("data: ")[-2]
            assert f'"cached_tokens":{(count - 1) // 4 * 4}' in last
        else:
            usage = http.post("/v1/completions", json=body).json()["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert found == [0, (count - 1) // 4 * 4, (count - 1) // 4 * 4, 0]


def test_the_best_of_several_choices(gateways: Gateways, http: httpx.Client) -> None:
    """All choices of the stand-in are alike: of equal ones those with the smaller seeds, and all count."""
    body = {"prompt": ["one", PROMPT], "max_tokens": 5, "best_of": 4, "n": 2}
    done = http.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in done["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in done["choices"]] == [
        expected_text(gateways, encoded(gateways, text), 5) for text in ("one", "one", PROMPT, PROMPT)
    ]
    assert [choice["logprobs"] for choice in done["choices"]] == [None] * 4
    assert done["usage"]["completion_tokens"] == 2 * 4 * 5


@pytest.mark.parametrize(("route", "instead"), [("responses", "chat/completions"), ("embeddings", "embedding model")])
def test_routes_that_are_not_there_name_what_to_use(http: httpx.Client, route: str, instead: str) -> None:
    response = http.post(f"/v1/{route}", json={"model": MODEL, "input": "a"})
    assert response.status_code == 404
    assert instead in response.json()["error"]["message"]
