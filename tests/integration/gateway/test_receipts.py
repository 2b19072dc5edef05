"""What names the target in an answer, and receipts, over HTTP and gRPC."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pydantic import SecretStr

from spool.client import Client, GenerateRequest
from spool.client.v1 import generation_pb2_grpc
from spool.deploy.offline.answer_text import text_difference
from spool.scheduler.messages import Role
from spool.scheduler.sampling import SamplingParameters
from spool.services.gateway.settings import GatewaySettings, SamplingDefaults
from spool.services.receipts.fingerprint import fingerprint_name
from spool.services.receipts.receipt import Receipt, receipts_in
from spool.services.receipts.signing import ReceiptKey
from tests.integration.gateway.expected import (
    CHAT,
    ENDLESS,
    PROMPT,
    STEP_SECONDS,
    TIMEOUT,
    completion,
    encoded,
    expected_tokens,
    streamed,
)
from tests.support.cells import Cell, all_in_use, running_worker
from tests.support.gateway import MODEL, Gateways, Served, running_cell, save_tokenizer
from tests.support.waiting import LONG

PARTS = {"weights": MODEL, "exact": "on", "processor": "any"}
NAME = fingerprint_name(PARTS)
SAMPLED = {"temperature": 0.7, "top_p": 0.5, "seed": 3, "logit_bias": {"5": -1}, "min_tokens": 2}


def receipt_of(gateways: Gateways, prompt: list[int], seed: int, count: int, **sampling: Any) -> Receipt:
    """Of a choice: the stand-in's digest of the logits of a token is the token plus 5."""
    tokens = expected_tokens(gateways, prompt, count)
    known = SamplingParameters(seed=seed, **sampling)
    return Receipt(MODEL, PARTS, tuple(prompt), tuple(tokens), tuple(token + 5 for token in tokens), known)


def test_every_answer_names_the_fingerprint_of_its_target(served: Served, http: httpx.Client) -> None:
    asked = {"messages": CHAT, "max_tokens": 3}
    answers = [
        completion(http, max_tokens=3),
        http.post("/v1/chat/completions", json=asked).json(),
        *streamed(http, prompt=PROMPT, max_tokens=3),
        *streamed(http, "chat/completions", **asked),
    ]
    assert {answer["system_fingerprint"] for answer in answers} == {NAME}
    [model] = http.get("/v1/models").json()["data"]
    assert (model["system_fingerprint"], model["fingerprint"]) == (NAME, PARTS)
    with Client(served.address) as client:
        request = GenerateRequest(text=PROMPT, max_tokens=3)
        assert client.generate(request).system_fingerprint == NAME
        assert {part.system_fingerprint for part in client.stream(request)} == {NAME}


def test_tokens_by_their_numbers(gateways: Gateways, http: httpx.Client) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 8, "logprobs": 2, "return_tokens_as_token_ids": True}
    names = [f"token_id:{token}" for token in expected_tokens(gateways, encoded(gateways), 8)]
    [choice] = completion(http, **asked)["choices"]
    assert choice["logprobs"]["tokens"] == names
    assert [top.keys() & {name} for top, name in zip(choice["logprobs"]["top_logprobs"], names, strict=True)] == [
        {name} for name in names
    ]
    body = {"messages": CHAT, "max_tokens": 2, "logprobs": True, "return_tokens_as_token_ids": True}
    [chat] = http.post("/v1/chat/completions", json=body).json()["choices"]
    tokens = expected_tokens(gateways, gateways.tokenizer.encode_chat(CHAT), 2)
    assert [entry["token"] for entry in chat["logprobs"]["content"]] == [f"token_id:{token}" for token in tokens]


def test_a_top_p_of_zero_is_recorded_as_the_greedy_choice_that_it_is(served: Served, http: httpx.Client) -> None:
    for asked in ({"top_p": 0}, {"top_p": 0.0, "temperature": 0.8}):
        with Client(served.address) as client:
            [answer] = client.generate(GenerateRequest(text=PROMPT, receipt=True, **asked)).choices
        [choice] = completion(http, receipt=True, **asked)["choices"]
        for receipt in (choice["receipt"], json.loads(answer.receipt)):
            assert (receipt["sampling"]["temperature"], receipt["sampling"]["top_p"]) == (0.0, 1.0)
            Receipt.from_json(receipt)
    # A value that is wrong is refused all the same.
    response = http.post("/v1/completions", json={"prompt": PROMPT, "top_p": 0, "temperature": -1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "temperature")


@pytest.mark.parametrize("spool", [{"speculation": False}, {"draft_length": 4}], ids=str)
def test_receipts_of_choices(gateways: Gateways, http: httpx.Client, spool: dict[str, Any]) -> None:
    prompt, end = encoded(gateways), gateways.tokenizer.stop_token_ids
    rest: dict[str, Any] = {"temperature": 0.7, "top_p": 0.5, "logit_bias": {5: -1.0}}
    rest |= {"min_tokens": 2, "end_token_ids": frozenset(end)}
    expected = [receipt_of(gateways, prompt, seed, 20, **rest) for seed in (3, 4)]
    asked = {"prompt": PROMPT, "max_tokens": 20, "n": 2, "receipt": True, "spool": spool, **SAMPLED}
    whole = completion(http, **asked)["choices"]
    assert [Receipt.from_json(choice["receipt"]) for choice in whole] == expected
    events = [choice for event in streamed(http, **asked) for choice in event["choices"]]
    assert [bool(choice["finish_reason"]) for choice in events] == ["receipt" in choice for choice in events]
    found = {choice["index"]: choice["receipt"] for choice in events if "receipt" in choice}
    assert [found[0], found[1]] == [choice["receipt"] for choice in whole]
    body = {"messages": CHAT, "max_tokens": 9, "receipt": True, "temperature": 0, "seed": 1, "spool": spool}
    [chat] = http.post("/v1/chat/completions", json=body).json()["choices"]
    prompt = gateways.tokenizer.encode_chat(CHAT)
    assert Receipt.from_json(chat["receipt"]) == receipt_of(gateways, prompt, 1, 9)
    *_, last = [choice for event in streamed(http, "chat/completions", **body) for choice in event["choices"]]
    assert last["receipt"] == chat["receipt"]


def test_a_receipt_covers_what_was_delivered(gateways: Gateways, http: httpx.Client) -> None:
    text = completion(http, max_tokens=30)["choices"][0]["text"]
    stop = next(text[place : place + 2] for place in range(6, 20) if "\ufffd" not in text[place : place + 2])
    asked = {"prompt": PROMPT, "max_tokens": 30, "stop": stop, "receipt": True, "return_token_ids": True}
    [choice] = completion(http, **asked)["choices"]
    receipt = Receipt.from_json(choice["receipt"])
    assert (list(receipt.prompt), list(receipt.output)) == (encoded(gateways), choice["token_ids"])
    assert receipt.logits_digests == tuple(token + 5 for token in receipt.output)


def test_receipts_over_grpc(gateways: Gateways, served: Served) -> None:
    request = GenerateRequest(text=PROMPT, max_tokens=12, temperature=0, seed=8, n=2, receipt=True)
    expected = [receipt_of(gateways, encoded(gateways), seed, 12) for seed in (8, 9)]
    with Client(served.address) as client:
        whole = client.generate(request).choices
        parts = [part.choice for part in client.stream(request) if part.choice.receipt]
    for choices in (whole, sorted(parts, key=lambda part: part.index)):
        assert [Receipt.from_json(json.loads(choice.receipt)) for choice in choices] == expected
    assert all(part.finish_reason for part in parts)


PRIVATE = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
KEY = ReceiptKey(PRIVATE)
SIGNING = GatewaySettings(
    receipts=True, receipt_key=SecretStr(PRIVATE), sampling=SamplingDefaults(temperature=0), model_names=("demo",)
)


def test_the_server_can_give_receipts_to_all_and_sign_them(gateways: Gateways) -> None:
    public = KEY.public
    with (
        gateways.serve(SIGNING) as served,
        httpx.Client(base_url=served.url, timeout=TIMEOUT) as http,
        grpc.insecure_channel(served.address) as channel,
    ):
        [choice] = completion(http, max_tokens=4)["choices"]
        assert Receipt.from_json(choice["receipt"], public).model == "demo"
        assert "receipt" not in completion(http, max_tokens=4, receipt=False)["choices"][0]
        assert "receipt" not in completion(http, max_tokens=0, echo=True)["choices"][0]
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        [found] = stub.Generate(GenerateRequest(text=PROMPT, max_tokens=4), timeout=LONG).choices
        Receipt.from_json(json.loads(found.receipt), public)
        assert not stub.Generate(GenerateRequest(text=PROMPT, receipt=False), timeout=LONG).choices[0].receipt


def test_a_receipt_that_cannot_be_is_refused(http: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> None:
    response = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 0, "echo": True, "receipt": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "receipt")
    assert "must be false where max_tokens is 0" in response.json()["error"]["message"]
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("model"))
    cell = running_cell(tokenizer_digest=tokenizer.vocabulary_digest.hex(), exact=False)
    with (
        Gateways(tokenizer, cell) as inexact,
        inexact.serve(GatewaySettings(receipts=True)) as served,
        httpx.Client(base_url=served.url) as other,
    ):
        response = other.post("/v1/completions", json={"prompt": PROMPT, "receipt": True})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "receipt")
        assert "the targets do not run in exact mode" in response.json()["error"]["message"]
        assert "receipt" not in completion(other)["choices"][0]


def test_the_server_computes_what_it_has_signed_again(gateways: Gateways) -> None:
    """In fewer steps than there are tokens; what it has signed of others' bits is refused, and the place named."""
    prompts = [f"{PROMPT} {number}" for number in range(100)]
    with gateways.serve(SIGNING) as served, httpx.Client(base_url=served.url, timeout=TIMEOUT) as http:
        answers = [completion(http, prompt=prompts, max_tokens=30, seed=seed) for seed in (1, 2, 3)]
        choices = [choice for answer in answers for choice in answer["choices"]]
        one, *_ = receipts = [Receipt.from_json(choice["receipt"], KEY.public) for choice in choices]
        unlike = {
            "output token 3 is ": replace(one, output=(*one.output[:3], 100, *one.output[4:])),
            "output token 9 is ": replace(one, logits_digests=(*one.logits_digests[:9], 1, *one.logits_digests[10:])),
            "fingerprint, in the receipt and of the targets: exact off and on": replace(
                one, fingerprint={**PARTS, "exact": "off"}
            ),
            "it cannot be computed: prompt of": replace(one, prompt=one.prompt * 200),
            "output token 3 is 1000 ": replace(one, output=(*one.output[:3], 1000, *one.output[4:])),
        }
        texts = [json.dumps(receipt.to_json(KEY)) for receipt in [*receipts, *unlike.values()]]
        endless = one.to_json(KEY)
        endless["sampling"]["seed"] = math.inf
        texts += [json.dumps(one.to_json()), "{", "[" * 100_000, json.dumps(endless)]
        reasons = [*unlike, "signature is missing", *["the receipt is no JSON"] * 2, "sampling cannot be read"]
        surrogate = {r"there is no receipt: \ud800": {"refused": "\ud800"}, "version is ": {"version": "\ud800"}}
        texts += [json.dumps(receipt) for receipt in surrogate.values()]
        reasons += surrogate
        targets = [worker.executor.engine for worker in gateways.cell.workers if worker.role is Role.TARGET]
        before = sum(target.steps for target in targets)
        with Client(served.address) as client:
            found = sorted(client.replay(texts, timeout=TIMEOUT), key=lambda answer: answer.index)
    assert [answer.index for answer in found] == [*range(len(texts))]
    assert all(answer.equal and not answer.reason for answer in found[: len(receipts)])
    for answer, reason in zip(found[len(receipts) :], reasons, strict=True):
        assert (answer.equal, answer.reason.startswith(reason)) == (False, True), answer.reason
    assert sum(target.steps for target in targets) - before < sum(len(each.output) for each in receipts) / 8


@asynccontextmanager
async def unlike_targets(**settings: Any) -> AsyncIterator[Cell]:
    async with (
        running_cell(drafts=0, **settings) as cell,
        running_worker("target-1", Role.TARGET, cell.resolve, processor="another", **settings) as other,
    ):
        await all_in_use([other])
        cell.workers.append(other)
        yield cell


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "leaves"])
def test_what_unlike_targets_computed_together_has_no_receipt(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture, dies: bool
) -> None:
    """What one of them computed alone has one, also where it was to leave meanwhile."""
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("model"))
    cell = unlike_targets(tokenizer_digest=tokenizer.vocabulary_digest.hex(), step_seconds=STEP_SECONDS)
    others = PARTS | {"processor": "another"}
    with (
        Gateways(tokenizer, cell) as gateways,
        gateways.serve() as served,
        httpx.Client(base_url=served.url, timeout=TIMEOUT) as http,
    ):
        assert "targets target-1 and target-0 may give other bits: processor another and any" in caplog.text
        # A target that leaves waits for the end of its stream.
        asked = {**ENDLESS, "max_tokens": 600 if dies else 40, "receipt": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=asked) as response:
            events = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
            first = next(events)
            (target,) = [worker for worker in gateways.cell.workers if worker.pages_in_use]
            if dies:
                gateways.run(target.registration.close())
                gateways.run(target.server.stop(0))
            else:
                assert gateways.run(target.registration.leave(LONG)) == 0
            for worker in gateways.cell.workers:
                worker.executor.engine.step_seconds = 0.0
            *_, last = events
        [choice] = last["choices"]
        own = others if target.worker_id == "target-1" else PARTS
        one, other = ("another", "any") if own == others else ("any", "another")
        reason = f"targets that are not alike computed the output: processor {one} and {other}"
        assert first["system_fingerprint"] == fingerprint_name(own)
        if dies:
            assert choice["receipt"] == {"refused": reason}
            assert last["system_fingerprint"] == "+".join(sorted([NAME, fingerprint_name(others)]))
        else:
            assert Receipt.from_json(choice["receipt"]).fingerprint == own
            assert last["system_fingerprint"] == fingerprint_name(own)
        [choice] = completion(http, max_tokens=9, receipt=True)["choices"]
        assert Receipt.from_json(choice["receipt"]).fingerprint == (PARTS if own == others else others)


TEXTS: list[dict[str, Any]] = [
    {},
    {"echo": True},
    {"skip_special_tokens": False},
    {"n": 3, "temperature": 1.0},
    {"stop": ["e", "a", "th"], "temperature": 1.0, "n": 4},
    {"stop": ["e", "a", "th"], "include_stop_str_in_output": True, "temperature": 1.0, "n": 4},
    {"stop_token_ids": list(range(150, 300)), "temperature": 1.0, "n": 4},
    {"echo": True, "stop": "a", "n": 4, "temperature": 1.0},
    {"ignore_eos": True, "return_token_ids": True},
]


def wrong_texts(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """The choice with a letter in another case, cut by a letter, and cut at a stop string that was not the end."""
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    place = next((at for at, letter in enumerate(text) if letter.isascii() and letter.isalpha()), None)
    if place is None:
        return []
    wrong = [{"text": f"{text[:place]}{text[place].swapcase()}{text[place + 1 :]}"}]
    if text[place + 2 :]:
        wrong.append({"text": text[:place] + text[place + 1 :]})
    if text[place + 4 :]:
        wrong.append({"text": text[: place + 1], "finish_reason": "stop", "stop_reason": text[place]})
    if "text" in choice:
        return [choice | one for one in wrong]
    ends = [{name: value for name, value in one.items() if name != "text"} for one in wrong]
    return [choice | end | {"message": {"content": one["text"]}} for one, end in zip(wrong, ends, strict=True)]


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("fields", TEXTS, ids=lambda fields: "-".join(fields) or "plain")
def test_texts_are_found_to_be_those_of_their_tokens(
    gateways: Gateways, http: httpx.Client, fields: dict[str, Any]
) -> None:
    """As answers and in streams, of prompts that end anywhere, also within a character; not with a letter changed."""
    prompts = [PROMPT, "caf\u00e9 ", encoded(gateways)[:-1], [*encoded(gateways), 130]]
    changed = 0
    for number, prompt in enumerate(prompts):
        asked = {"prompt": prompt, "max_tokens": 40, "receipt": True, "seed": number, **fields}
        chat = {"messages": CHAT, "max_tokens": 40, "receipt": True, "seed": number, **fields}
        entries = [completion(http, **asked), *streamed(http, **asked)]
        if "echo" not in fields:
            entries.append(http.post("/v1/chat/completions", json=chat).json())
            entries += streamed(http, "chat/completions", **chat)
        for found in receipts_in(entries):
            receipt = Receipt.from_json(found.data)
            assert text_difference(found, receipt, gateways.tokenizer) is None, (fields, found.choices)
            if len(found.choices) > 1:
                continue
            [choice] = found.choices
            for wrong in wrong_texts(choice):
                difference = text_difference(replace(found, choices=[wrong]), receipt, gateways.tokenizer)
                assert difference is not None, (choice, wrong)
                changed += 1
    assert changed >= 3


def test_reasoning_and_content_are_those_of_the_tokens(gateways: Gateways) -> None:
    """With its marks, opened by the prompt or not, or left out, with the white space around it."""

    def difference(said: str, message: dict[str, Any], prompt: str = "a", **choice: Any) -> str | None:
        prompt_ids, ids = (tuple(gateways.tokenizer.encode(text)) for text in (prompt, said))
        receipt = Receipt(MODEL, PARTS, prompt_ids, ids, tuple(ids), SamplingParameters())
        [found] = receipts_in([{"choices": [{"message": message, "finish_reason": "length", **choice, "receipt": 1}]}])
        return text_difference(found, receipt, gateways.tokenizer)

    both = {"reasoning": "why", "reasoning_content": "why", "content": "So."}
    for said, prompt in (("<think>\nwhy\n</think>\n\nSo.", "a"), ("why</think> So.", "a<think>\n")):
        assert difference(said, both, prompt) is None
        assert difference(said, {"content": "So."}, prompt) is None
        cut = difference(said, {"reasoning": "why", "content": None}, prompt)
        assert str(cut).startswith("message.content goes on with nothing at character 0")
        for name in both:
            assert f"message.{name} goes on" in str(difference(said, both | {name: both[name][1:]}, prompt))
        ended = {"finish_reason": "stop", "stop_reason": "."}
        assert difference(said, both | {"content": "So"}, prompt, **ended) is None
        assert difference(said, both | {"content": "S"}, prompt, **(ended | {"stop_reason": "o"})) is not None
    assert difference("why</think> So.", both) is not None
    assert difference("<think>why", {"reasoning": "why", "content": None}) is None
