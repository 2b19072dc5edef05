"""Every field that OpenAI's and vLLM's clients send has an effect, is ignored as documented, or is refused by name."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal, get_type_hints

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from spool.services.backend.interface import GenerationRequest
from tests.integration.gateway.expected import TIMEOUT, error_of
from tests.integration.gateway.test_http_tools import ASK, TOOLS, Open, Talk, talk
from tests.support.chat_templates import HERMES

__all__ = ["talk"]

Outcome = Literal["has effect", "has none here", "ignored", "refused"]
Fields = dict[str, tuple[Any, Outcome] | tuple[Any, Outcome, dict[str, Any]]]
"""A value, what comes of it, and the fields that it needs. Some values have no effect on a short answer."""


def all_of(outcome: Outcome, names: str) -> Fields:
    """Of fields on whose value nothing depends."""
    return dict.fromkeys(names.split(), ("?", outcome))


SAID = "Well, well."
BOTH: Fields = {
    **all_of("ignored", "user"),
    "frequency_penalty": (0.5, "has effect"),
    "logit_bias": ({"5": 10}, "has effect"),
    "max_tokens": (3, "has effect"),
    "model": ("speaker", "has none here"),
    "n": (2, "has effect"),
    "presence_penalty": (0.5, "has effect"),
    "seed": (7, "has effect"),
    "stop": ("l", "has effect"),
    "stream": (True, "has effect"),
    "stream_options": ({"include_usage": True}, "has effect", {"stream": True}),
    "temperature": (0.5, "has effect"),
    "top_p": (0.5, "has effect"),
}
VLLM: Fields = {
    **all_of(
        "refused",
        "early_stopping allowed_token_ids ec_transfer_params guided_choice guided_decoding_backend "
        "guided_grammar guided_json guided_regex guided_whitespace_pattern kv_transfer_params "
        "length_penalty logits_processors repetition_detection request_id "
        "spaces_between_special_tokens structural_tag truncate_prompt_tokens use_beam_search vllm_xargs",
    ),
    "bad_words": (["b"], "has effect"),
    "cache_salt": ("a", "has effect"),
    "ignore_eos": (True, "has effect"),
    "include_stop_str_in_output": (True, "has effect", {"stop": "l"}),
    "min_p": (0.1, "has effect"),
    "min_tokens": (1, "has effect"),
    "priority": (3, "has effect"),
    "prompt_logprobs": (1, "has effect"),
    "repetition_penalty": (1.1, "has effect"),
    "response_format": ({"type": "json_object"}, "has effect"),
    "return_token_ids": (True, "has effect"),
    "skip_special_tokens": (False, "has none here"),
    "stop_token_ids": ([5], "has effect"),
    "structured_outputs": ({"regex": "a+"}, "has effect"),
    "top_k": (5, "has effect"),
}
COMPLETION: Fields = {
    **BOTH,
    **VLLM,
    **all_of("refused", "add_special_tokens best_of prompt_embeds suffix"),
    "echo": (True, "has effect"),
    "logprobs": (1, "has effect"),
    "return_tokens_as_token_ids": (True, "has effect", {"logprobs": 1}),
    "top_k": (-1, "has none here"),
}
CHAT: Fields = {
    **BOTH,
    **VLLM,
    **all_of(
        "ignored",
        "metadata prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier service_tier store",
    ),
    **all_of(
        "refused",
        "add_special_tokens audio best_of chat_template documents echo function_call functions "
        "media_io_kwargs mm_processor_kwargs modalities moderation prediction reasoning_effort "
        "thinking_token_budget verbosity web_search_options",
    ),
    "add_generation_prompt": (False, "has effect"),
    "chat_template_kwargs": ({}, "has none here"),
    "continue_final_message": (True, "has effect"),
    "include_reasoning": (False, "has none here"),
    "logprobs": (True, "has effect"),
    "max_completion_tokens": (3, "has effect"),
    "parallel_tool_calls": (False, "has none here", {"tools": TOOLS}),
    "return_tokens_as_token_ids": (True, "has effect", {"logprobs": True}),
    "tool_choice": ("required", "has effect", {"tools": TOOLS}),
    "tools": (TOOLS, "has effect"),
    "top_logprobs": (1, "has effect", {"logprobs": True}),
}
ROUTES: dict[str, tuple[dict[str, Any], Fields, Any]] = {
    "completions": ({"prompt": "a"}, COMPLETION, completion_create_params),
    "chat/completions": ({"messages": ASK}, CHAT, chat_create_params),
}


def asked(
    model: Talk, http: httpx.Client, route: str, body: dict[str, Any]
) -> tuple[httpx.Response, list[GenerationRequest], Any]:
    """The response, and what does not differ from request to request: of sequences, and of the response."""
    model.backend.says, model.backend.requests = [SAID] * 4, []
    response = http.post(f"/v1/{route}", json={"seed": 1, **body})
    sequences = [replace(one, request_id="", traceparent="", deadline_seconds=None) for one in model.backend.requests]
    if "json" not in response.headers["content-type"]:
        return response, sequences, response.text.count("data: ")
    return response, sequences, {key: value for key, value in response.json().items() if key not in ("id", "created")}


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_of_the_clients(talk: Open, route: str) -> None:
    base, fields, hints = ROUTES[route]
    known = get_type_hints(hints.CompletionCreateParamsStreaming).keys() - base.keys()
    assert known <= fields.keys()
    with talk(HERMES) as model, httpx.Client(base_url=model.url, timeout=TIMEOUT) as http:
        for name, (value, outcome, *needs) in fields.items():
            plain = {**base, **(needs[0] if needs else {})}
            response, *found = asked(model, http, route, {**plain, name: value})
            if outcome == "refused":
                assert (response.status_code, response.json()["error"]["param"]) == (400, name), response.text
                assert re.search(f"{name} is not (supported by this server|a known field)", error_of(response))
                continue
            assert response.status_code == 200, (name, response.text)
            _, *before = asked(model, http, route, plain)
            if outcome != "has none here":
                assert (found != before) == (outcome == "has effect"), name
