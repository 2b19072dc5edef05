"""Turns protobuf messages into requests, and pieces of text into protobuf messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from spool.client.v1 import generation_pb2 as pb
from spool.scheduler.messages import TokenLogprobs
from spool.services.gateway.choice import EndReason, Piece
from spool.services.gateway.completion import Completion, Usage
from spool.services.gateway.errors import invalid
from spool.services.gateway.options import (
    ChatPrompt,
    GenerationOptions,
    Prompt,
    TextPrompt,
    TokenPrompt,
    chat_message,
    check_counts,
    check_length,
    options_given,
)
from spool.services.gateway.settings import Limits
from spool.services.gateway.structure import ANY_JSON_OBJECT, Structure
from spool.services.gateway.token_strings import TokenStrings

_FINISH_REASONS: dict[EndReason | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}


def options_from_message(request: pb.GenerateRequest, timeout_seconds: float | None) -> GenerationOptions:
    """Raises RequestError."""
    given: dict[str, Any] = {field.name: value for field, value in request.ListFields()}
    check_counts(given)
    given |= {"logit_bias": dict(request.logit_bias)}
    structured = given.get("structured_outputs")
    structure = None if structured is None else _structure(structured)
    return options_given(given, structure=structure, timeout_seconds=timeout_seconds)


def _structure(asked: pb.StructuredOutputs) -> Structure:
    """Raises RequestError."""
    param = "structured_outputs"
    match asked.WhichOneof("constraint"):
        case "json_object" if asked.json_object:
            return Structure("json_schema", ANY_JSON_OBJECT, param)
        case "json_schema":
            return Structure("json_schema", asked.json_schema, param)
        case "regex":
            return Structure("regex", asked.regex, param)
        case "choice":
            return Structure("choice", json.dumps(list(asked.choice.texts)), param)
        case "grammar":
            return Structure("grammar", asked.grammar, param)
    raise invalid(f"{param} is empty, must have json_object (true), json_schema, regex, choice or grammar", param)


def prompt_from_message(request: pb.GenerateRequest, limits: Limits) -> Prompt:
    """Raises RequestError."""
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "tokens":
            return TokenPrompt(tuple(request.tokens.token_ids))
        case "chat":
            return _chat(request.chat, limits)
    raise invalid("prompt is missing, must be text, tokens or chat", "prompt")


def text_from_message(request: pb.TokenizeRequest, limits: Limits) -> TextPrompt | ChatPrompt:
    """Raises RequestError."""
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "chat":
            return _chat(request.chat, limits)
    raise invalid("prompt is missing, must be text or chat", "prompt")


def _chat(chat: pb.Chat, limits: Limits) -> ChatPrompt:
    check_length("messages", chat.messages, limits.messages)
    messages = tuple(chat_message(message.role, message.content) for message in chat.messages)
    begin = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    return ChatPrompt(messages, {"add_generation_prompt": begin})


def usage_message(usage: Usage) -> pb.GenerationUsage:
    return pb.GenerationUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        drafted_tokens=usage.drafted,
        accepted_tokens=usage.accepted,
        seed=usage.seed,
        cached_prompt_tokens=usage.cached_tokens,
    )


class ChoiceMessages:
    """Turns pieces of text into messages."""

    def __init__(self, strings: TokenStrings) -> None:
        self._strings = strings

    def of(self, piece: Piece, completion: Completion) -> pb.GeneratedChoice:
        choice = pb.GeneratedChoice(
            index=piece.index,
            text=piece.text,
            token_ids=piece.tokens,
            logprobs=self._logprobs(piece.logprobs),
            prompt_logprobs=self._logprobs(piece.prompt_logprobs),
            finish_reason=_FINISH_REASONS[piece.finish_reason],
        )
        if piece.finish_reason is not None and (receipt := completion.receipt(piece.index)) is not None:
            choice.receipt = json.dumps(receipt)
        if isinstance(piece.stop_reason, str):
            choice.stop_string = piece.stop_reason
        elif piece.stop_reason is not None:
            choice.stop_token_id = piece.stop_reason
        return choice

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[pb.OutputTokenLogprobs]:
        return [
            pb.OutputTokenLogprobs(
                chosen=self._logprob(entry.token_id, entry.logprob),
                top=[self._logprob(token, logprob) for token, logprob in entry.top],
            )
            for entry in entries
        ]

    def _logprob(self, token: int, logprob: float) -> pb.Logprob:
        string = self._strings.of(token)
        return pb.Logprob(token_id=token, token=string.text, token_bytes=string.data, logprob=logprob)
