"""Log probabilities of the output and of the prompt, in OpenAI's form and in vLLM's, over HTTP and gRPC."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import openai
import pytest

from spool.client.v1 import generation_pb2 as pb
from spool.client.v1 import generation_pb2_grpc
from spool.scheduler.messages import TokenLogprobs
from spool.services.gateway.token_strings import TokenStrings
from tests.integration.gateway.expected import (
    CHAT,
    PROMPT,
    TIMEOUT,
    completion,
    encoded,
    error_of,
    expected_tokens,
    streamed,
)
from tests.support.gateway import MODEL, Gateways, Served
from tests.support.stand_in_worker import prompt_logprobs
from tests.support.waiting import LONG

LONG_PROMPT = "the cat sat on the mat and the dog on the log, " * 8
"""Of more tokens than a prefill chunk."""


def texts(gateways: Gateways, tokens: list[int]) -> list[str]:
    strings = TokenStrings(gateways.tokenizer)
    return [strings.of(token).text for token in tokens]


def in_vllms_form(gateways: Gateways, entries: list[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """By token id, the likeliest with their rank."""
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


def joined(events: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The log probabilities of a stream as those of a whole answer."""
    parts = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"] is not None]
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def test_completions(gateways: Gateways, http: httpx.Client) -> None:
    tokens = expected_tokens(gateways, encoded(gateways), 12)
    asked = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 3}
    [choice] = completion(http, **asked)["choices"]
    found = choice["logprobs"]
    assert found["token_logprobs"] == [-0.25] * 12
    assert [len(top) for top in found["top_logprobs"]] == [3] * 12
    assert found["tokens"] == texts(gateways, tokens)
    for place, token in enumerate(tokens):
        text = gateways.tokenizer.decode([token], skip_special_tokens=False)
        # The text at the offset is the token's, unless the token is part of a character or has no text.
        if "\ufffd" not in gateways.tokenizer.decode(tokens[: place + 1]) and token < 932:
            assert choice["text"][found["text_offset"][place] :].startswith(text)
    assert joined(streamed(http, **asked)) == found
    # The sampled token is there whether it is among the likeliest or not.
    [alone] = completion(http, **asked | {"logprobs": 0})["choices"]
    assert alone["logprobs"]["top_logprobs"] == [{token: -0.25} for token in found["tokens"]]


def test_chats(gateways: Gateways, client: openai.OpenAI) -> None:
    tokens = expected_tokens(gateways, gateways.tokenizer.encode_chat(CHAT), 20)
    arguments: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 20, "logprobs": True}
    logprobs = client.chat.completions.create(**arguments, top_logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    joined_bytes = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert joined_bytes.decode(errors="replace") == gateways.tokenizer.decode(tokens)
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 20
    assert all(entry.top_logprobs[0].token == entry.token for entry in logprobs.content)
    chunks = list(client.chat.completions.create(**arguments, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert [entry.token for part in parts for entry in part.content or []] == [
        entry.token for entry in logprobs.content
    ]


@pytest.mark.parametrize(("max_tokens", "as_tokens"), [(0, False), (1, True), (4, False)])
def test_echo(gateways: Gateways, client: openai.OpenAI, max_tokens: int, as_tokens: bool) -> None:
    """As evaluation harnesses ask for log-likelihoods; of prompts shorter and longer than a chunk at once."""
    prompts = [PROMPT, LONG_PROMPT, "a"]
    given: Any = [encoded(gateways, text) for text in prompts] if as_tokens else prompts
    done = client.completions.create(model=MODEL, prompt=given, max_tokens=max_tokens, echo=True, logprobs=2)
    for choice, text in zip(done.choices, prompts, strict=True):
        tokens = encoded(gateways, text)
        output = expected_tokens(gateways, tokens, max_tokens) if max_tokens else []
        assert (choice.text, choice.finish_reason) == (text + gateways.tokenizer.decode(output), "length")
        found = choice.logprobs
        assert found is not None
        assert found.tokens == texts(gateways, [*tokens, *output])
        scores = [entry.logprob for entry in prompt_logprobs(tokens, 2)]
        assert found.token_logprobs == [None, *scores, *[-0.25] * len(output)]
        assert [top and len(top) for top in found.top_logprobs or []] == [None] + [2] * (len(found.tokens) - 1)
        for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs or [], strict=True):
            assert top is None or top[token] == logprob
        assert len(found.text_offset or []) == len(found.tokens)
        for offset, token in zip(found.text_offset or [], texts(gateways, tokens), strict=False):
            assert choice.text[offset:].startswith(token)
    assert done.usage is not None
    assert done.usage.completion_tokens == 3 * max_tokens
    assert done.usage.prompt_tokens == sum(len(encoded(gateways, text)) for text in prompts)


def test_prompt_logprobs_in_the_form_of_vllm(gateways: Gateways, http: httpx.Client) -> None:
    """Also with an echo that shows another number of likeliest tokens."""
    tokens = encoded(gateways)
    asked = {"prompt": [PROMPT, LONG_PROMPT], "max_tokens": 2, "prompt_logprobs": 1, "logprobs": 3, "echo": True}
    choices = completion(http, **asked)["choices"]
    assert choices[0]["prompt_logprobs"] == in_vllms_form(gateways, prompt_logprobs(tokens, 1))
    assert choices[1]["prompt_logprobs"] == in_vllms_form(gateways, prompt_logprobs(encoded(gateways, LONG_PROMPT), 1))
    assert [len(top or {}) for top in choices[0]["logprobs"]["top_logprobs"]] == [0] + [3] * (len(tokens) + 1)
    chat = http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 2, "prompt_logprobs": 0}).json()
    scores = prompt_logprobs(gateways.tokenizer.encode_chat(CHAT), 0)
    assert chat["prompt_logprobs"] == in_vllms_form(gateways, scores)
    assert "prompt_logprobs" not in http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 2}).json()


def test_the_log_probabilities_of_a_prompt_are_bounded(gateways: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its tokens counts, and the likeliest ones beside each."""
    prompt = list(range(20, 24))
    monkeypatch.setattr("spool.services.gateway.prompts.MOST_PROMPT_LOGPROBS", 12)
    with gateways.serve() as served:
        with httpx.Client(base_url=served.url, timeout=TIMEOUT) as http:
            assert completion(http, prompt=prompt, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
            assert completion(http, prompt=prompt * 3, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
            for asked in ({"prompt_logprobs": 3}, {"logprobs": 3, "echo": True}):
                response = http.post("/v1/completions", json={"prompt": prompt, **asked})
                assert response.status_code == 400
                assert "makes 16 log probabilities, must be at most 12" in error_of(response)
        with grpc.insecure_channel(served.address) as channel:
            request = pb.GenerateRequest(tokens=pb.TokenIds(token_ids=prompt), prompt_logprobs=3)
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            with pytest.raises(grpc.RpcError, match="makes 16 log probabilities, must be at most 12") as refused:
                stub.Generate(request)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_prompt_logprobs_over_grpc(gateways: Gateways, served: Served) -> None:
    expected = [(entry.token_id, entry.logprob) for entry in prompt_logprobs(encoded(gateways), 2)]
    request = pb.GenerateRequest(text=PROMPT, max_tokens=5, prompt_logprobs=2, n=2)
    with grpc.insecure_channel(served.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        whole = stub.Generate(request, timeout=LONG).choices
        parts = [message.choice for message in stub.GenerateStream(request, timeout=LONG)]
    first = [choice for choice in parts if choice.prompt_logprobs]
    assert sorted(choice.index for choice in first) == [0, 1]
    for choice in [*whole, *first]:
        assert [(one.chosen.token_id, one.chosen.logprob) for one in choice.prompt_logprobs] == expected
        assert [len(one.top) for one in choice.prompt_logprobs] == [2] * len(expected)
