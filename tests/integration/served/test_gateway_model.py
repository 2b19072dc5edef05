"""Sampling end to end, from an OpenAI client to the weights of a tiny model and back."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from engine.settings import EngineSettings
from scheduler.messages import Role
from services.launch.launcher import WorkerLaunch
from services.text.tokenizer import ModelTokenizer
from tests.support.gateway import Gateways
from tests.support.tiny_models import VOCABULARY, save_tiny_pair
from tests.unit.gateway.test_stop_strings import cut

pytestmark = pytest.mark.slow

PROMPT = "What is this?"
NEVER_END = {str(VOCABULARY - 1): -100}
SAMPLED: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": 60,
    "temperature": 0.8,
    "seed": 11,
    "logit_bias": NEVER_END,
}

# The draft is as large as the target, so the scheduler would not draft unless told to.
DRAFTED: dict[str, Any] = SAMPLED | {"extra_body": {"spool": {"draft_length": 4}}}


def save_tokenizer(folder: Path) -> None:
    """A tokenizer whose tokens are the characters of a keyboard."""
    letters = [letter for letter in string.printable if letter not in "\r\x0b\x0c"][: VOCABULARY - 1]
    words = {letter: index for index, letter in enumerate([*letters, "<end>"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}), encoding="utf-8")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    target, draft = save_tiny_pair("llama", tmp_path_factory.mktemp("tiny"))
    launches = []
    for role, folder in ((Role.TARGET, target), (Role.DRAFT, draft)):
        save_tokenizer(folder)
        settings = EngineSettings(
            str(folder), "float32", threads=1, kv_pages=200, exact=False, max_num_batched_tokens=64
        )
        launches.append(WorkerLaunch(role, asdict(settings), threads=1))
    gateways = Gateways(ModelTokenizer(target), launches)
    try:
        with gateways.serve() as served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            yield client
        gateways.wait_until_idle()
    finally:
        gateways.close()


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    [model] = client.models.list().data
    return model.id


def test_sampled_text_depends_on_its_seed_alone(client: openai.OpenAI, model: str) -> None:
    plain = [
        client.completions.create(
            model=model, **{**SAMPLED, "seed": 11 + number}, extra_body={"spool": {"speculation": False}}
        )
        for number in range(4)
    ]
    several = client.completions.create(model=model, **DRAFTED, n=4)
    texts = [choice.text for choice in several.choices]
    assert texts == [one.choices[0].text for one in plain]
    assert len(set(texts)) == 4
    assert several.usage is not None
    assert several.usage.to_dict()["spool"]["accepted"] > 20
    assert plain[0].usage is not None
    assert plain[0].usage.to_dict()["spool"]["drafted"] == 0


def test_log_probabilities_are_the_models(client: openai.OpenAI, model: str) -> None:
    arguments: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 30, "temperature": 0, "logprobs": 5}
    arguments["logit_bias"] = NEVER_END
    drafted = client.completions.create(**arguments, extra_body=DRAFTED["extra_body"]).choices[0].logprobs
    plain = client.completions.create(**arguments, extra_body={"spool": {"draft_length": 0}}).choices[0].logprobs
    assert drafted is not None
    assert plain is not None
    assert drafted.tokens == plain.tokens
    assert drafted.token_logprobs == pytest.approx(plain.token_logprobs, abs=1e-3)
    assert drafted.text_offset == list(range(30))
    for token, logprob, top in zip(
        drafted.tokens or [], drafted.token_logprobs or [], drafted.top_logprobs or [], strict=True
    ):
        # Greedy: the likeliest token is the sampled one.
        assert max(top, key=lambda each: top[each]) == token
        assert top[token] == logprob < 0
        assert sum(math.exp(each) for each in top.values()) <= 1 + 1e-6


def test_stop_strings_inside_accepted_runs(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, **SAMPLED).choices[0].text
    accepted = 0
    for start in range(5, 50, 5):
        stops = [whole[start : start + 3], whole[start + 1 : start + 6]]
        done = client.completions.create(model=model, **DRAFTED, stop=stops)
        expected, stop = cut(whole, stops)
        assert stop is not None
        assert done.choices[0].text == expected
        assert done.usage is not None
        # Each token of this tokenizer is one character.
        assert done.usage.completion_tokens == len(expected + stop)
        accepted += done.usage.to_dict()["spool"]["accepted"]
    assert accepted > 20


def test_chat_needs_a_template(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
