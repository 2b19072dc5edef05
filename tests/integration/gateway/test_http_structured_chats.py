"""Structured output of chats with tools and reasoning: what a model writes that takes any token its grammar allows."""

from __future__ import annotations

import json
import random
from contextlib import AbstractContextManager
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers

from spool.engine.sampling.grammars import GrammarTokens
from spool.services.backend.interface import GenerationRequest
from spool.services.gateway.answers.formats import FORMATS
from tests.integration.gateway.expected import EXPONENTIAL
from tests.integration.gateway.test_http_tools import (
    ASK,
    Open,
    Speaker,
    SpokenStream,
    Talk,
    as_joined,
    joined,
    talk,
    without_ids,
)
from tests.support import chat_templates
from tests.support.chat_templates import QWEN3_CODER, THINKING

__all__ = ["talk"]

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 4},
        "days": {"type": "array", "items": {"enum": [1, 2]}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "stop", "strict": True}},
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parameters": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["name", "parameters"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "asked", "schema": SCHEMA}}
MARKERS = sorted({"<think>", "</think>"}.union(*(form.markers for form in FORMATS.values())))


class Wanderer(Speaker):
    """Takes a random one of the tokens that the grammar allows, rather one that ends something. `begins` is how its
    answers begin."""

    begins = ""
    tokens: GrammarTokens | None = None

    def submit(self, request: GenerationRequest) -> SpokenStream:  # type: ignore[override]
        self.requests.append(request)
        assert request.sampling.grammar is not None
        tokens = self.tokens = self.tokens or GrammarTokens(
            tokenizers.Tokenizer.from_file(str(self.tokenizer.folder / "tokenizer.json"))
        )
        matcher = tokens.matcher(request.sampling.grammar.definition)
        closing = [self.tokenizer.token_id(text) for text in ("</think>", *']}"')]
        rng, output = random.Random(request.sampling.seed), self.tokenizer.encode(self.begins)
        assert matcher.try_consume_tokens(output) == len(output), matcher.get_error()
        while len(output) < request.max_tokens:
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
            if tokens.end in allowed and (len(allowed) == 1 or rng.random() < 0.5):
                break
            allowed = [token for token in allowed if token != tokens.end]
            ends = [token for token in closing if token in allowed]
            output.append(rng.choice(ends if ends and rng.random() < 0.6 else allowed))
            assert matcher.consume_token(output[-1]), matcher.get_error()
        [end] = self.tokenizer.stop_token_ids
        return SpokenStream(output, end, request, self.step)


def open_wanderer(talk: Open, template: str) -> AbstractContextManager[Talk]:
    # Qwen3-Coder's tags of functions are no tokens.
    markers = [text for text in MARKERS if template is not QWEN3_CODER or not text.startswith(("</p", "</f"))]
    return talk(template, None, Wanderer, markers)


def answers(model: Talk, seeds: int, **asked: Any) -> list[dict[str, Any]]:
    """Whole, and the same as streams; reasoning is apart."""
    found = []
    for seed in range(seeds):
        one = as_joined(model.whole("", seed=seed, **asked))
        assert without_ids(joined(model.chunks("", seed=seed, step=1 + seed % 3, **asked))) == without_ids(one)
        found.append(one)
    return found


def is_call(answer: dict[str, Any]) -> bool:
    """Whether it has calls only, which fit; otherwise it has content only, which fits."""
    if answer["tool_calls"]:
        assert (answer["finish_reason"], answer["content"]) == ("tool_calls", "")
        for _, name, arguments in answer["tool_calls"]:
            jsonschema.validate(json.loads(arguments), WEATHER if name == "weather" else {"type": "object"})
        return True
    assert answer["finish_reason"] == "stop"
    jsonschema.validate(json.loads(answer["content"]), SCHEMA)
    return False


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("family", ["HERMES", "LLAMA3", "QWEN3_CODER"])
def test_content_fits_the_schema_or_calls_fit_theirs(talk: Open, family: str) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "response_format": FORMAT}
    with open_wanderer(talk, getattr(chat_templates, family)) as model:
        assert {is_call(answer) for answer in answers(model, 8, **asked)} == {True, False}
        assert not any(is_call(answer) for answer in answers(model, 2, **asked, tool_choice="none"))
        assert '"weather"' not in model.backend.prompt
        named = {"type": "function", "function": {"name": "weather"}}
        for choice in ("required", named):
            for answer in answers(model, 2, **asked, tool_choice=choice):
                assert is_call(answer)
                assert choice == "required" or [call[1] for call in answer["tool_calls"]] == ["weather"]


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("asked", [{"tools": TOOLS, "tool_choice": "required"}, {"tools": TOOLS}, {}])
def test_reasoning_is_free_and_what_follows_is_not(talk: Open, asked: dict[str, Any]) -> None:
    request: dict[str, Any] = {**asked, "response_format": FORMAT}
    with open_wanderer(talk, THINKING) as model:
        # A model that need not reason may.
        for begins, thought in (("<think>\nHm {, or <tool?\n</think>\n\n", "Hm {, or <tool?"), ("{", "")):
            if begins != "{" or "tool_choice" not in asked:
                model.backend.begins = begins
                for answer in answers(model, 3, **request):
                    assert answer["reasoning_content"] == thought
                    assert is_call(answer) or "tool_choice" not in asked
        # The prompt begins the reasoning, or ends it.
        model.backend.begins = ""
        begun = answers(model, 3, **request, extra_body={"chat_template_kwargs": {"begin_thinking": True}})
        assert any(answer["reasoning_content"] for answer in begun)
        assert model.backend.prompt.endswith("<think>\n")
        ended = answers(model, 3, **request, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        assert not any(answer["reasoning_content"] for answer in ended)
        assert model.backend.prompt.endswith("</think>\n\n")
        # So does a message that is continued.
        message = {"role": "assistant", "content": "<think>\nLet me see"}
        options = {"continue_final_message": True, "add_generation_prompt": False}
        model.backend.begins = "Hm {"
        begun += answers(model, 3, **request, messages=[*ASK, message], extra_body=options)
        assert model.backend.prompt.endswith("<think>\nLet me see")
        assert all(answer["reasoning_content"].startswith("Hm {") for answer in begun[-3:])
        for answer in [*begun, *ended]:
            assert is_call(answer) or "tool_choice" not in asked


@pytest.mark.slow
def test_reasoning_before_other_structures(talk: Open) -> None:
    with open_wanderer(talk, THINKING) as model:
        model.backend.begins = "<think>a</think>"
        for structure, content in (
            ({"choice": ["yes", "\x7f\n"]}, ("yes", "\x7f\n")),
            ({"regex": "[ab]"}, ("a", "b")),
            ({"grammar": 'root ::= "x" | "y"'}, ("x", "y")),
            ({"grammar": 'start: "x" | "y"'}, ("x", "y")),
        ):
            [answer] = answers(model, 1, extra_body={"structured_outputs": structure})
            assert (answer["reasoning_content"], answer["finish_reason"]) == ("a", "stop")
            assert answer["content"] in content
        # Errors name the field, whatever stands around the structure.
        for schema in ({"type": "array", "uniqueItems": True}, {"type": "string", "pattern": f"^{EXPONENTIAL}$"}):
            response = model.post("", structured_outputs={"json": schema}, tools=TOOLS)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "structured_outputs")
