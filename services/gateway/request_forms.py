"""Fields of requests that come in several forms, checked by hand for messages that say what is wrong."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from services.gateway.options import Prompt, TextPrompt, TokenPrompt, shown

_TEMPLATE_NAMES = {"messages", "tools", "documents", "add_generation_prompt"}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def wrong(message: str, param: str | None = None) -> PydanticCustomError:
    """A fault for a validator to raise. Those of one field have its name put before the message, others give it."""
    # The library would take braces of the message for places to fill in.
    return PydanticCustomError("wrong_form", "{message}", {"message": message, "param": param})


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise wrong(f"is {shown(value)}, must be a list of token ids")
    for index, token in enumerate(value):
        if not _is_int(token):
            raise wrong(f"holds {shown(token)} at place {index}, must be token ids")
    return tuple(value)


def _prompts(value: object) -> tuple[Prompt, ...]:
    """Text, texts, token ids, or lists of token ids."""
    if isinstance(value, str):
        return (TextPrompt(_text(value)),)
    if not isinstance(value, list) or not value:
        raise wrong(f"is {shown(value)}, must be text, token ids, or a list of either")
    if all(isinstance(entry, str) for entry in value):
        return tuple(TextPrompt(_text(entry)) for entry in value)
    if all(isinstance(entry, list) for entry in value):
        return tuple(TokenPrompt(_token_ids(entry)) for entry in value)
    return (TokenPrompt(_token_ids(value)),)


def _text(value: str) -> str:
    if not value.isascii() and any(0xD800 <= ord(letter) <= 0xDFFF for letter in value):
        raise wrong("holds half a surrogate pair, which is no character")
    return value


def _stop(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise wrong(f"is {shown(value)}, must be a text or a list of texts")
    return tuple(_text(entry) for entry in value)


def _logit_bias(value: object) -> dict[int, float]:
    """JSON has only text as keys."""
    if not isinstance(value, dict):
        raise wrong(f"is {shown(value)}, must be an object with token ids as keys")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
            raise wrong(f"has the key {shown(key)}, must be a token id")
        if not (_is_int(bias) or isinstance(bias, float)) or not -100 <= bias <= 100:
            raise wrong(f"of token {key} is {shown(bias)}, must be between -100 and 100")
        biases[int(key)] = float(bias)
    return biases


def _template_options(value: object) -> dict[str, Any]:
    """Plain values under names that the template does not get from elsewhere."""
    if not isinstance(value, dict):
        raise wrong(f"is {shown(value)}, must be an object")
    for key, option in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isidentifier()) or key in _TEMPLATE_NAMES:
            raise wrong(f"has the key {shown(key)}, which is no option of a template")
        plain = option is None or isinstance(option, bool | int | str)
        if not plain and not (isinstance(option, float) and math.isfinite(option)):
            raise wrong(f"{key} is {shown(option)}, must be a text, a number, true, false or null")
        if isinstance(option, str):
            _text(option)
    return dict(value)


def _content(value: object) -> str:
    """Text, or parts of it; templates of text models know a text alone."""
    if isinstance(value, list) and value:
        texts = []
        for index, part in enumerate(value):
            text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            if not isinstance(text, str):
                raise wrong(f'has {shown(part)} at place {index}, must be {{"type": "text", "text": ...}}')
            texts.append(text)
        value = "\n".join(texts)
    if not isinstance(value, str):
        raise wrong(f"is {shown(value)}, must be a text or a list of text parts")
    return _text(value)


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {**_TOKEN_IDS, "minItems": 1},
        {"type": "array", "items": {**_TOKEN_IDS, "minItems": 1}, "minItems": 1},
    ]
}
_STOP_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_BIAS_SCHEMA = {
    "anyOf": [
        {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
        {"type": "null"},
    ]
}
_PLAIN = ["string", "number", "boolean", "null"]
_TEMPLATE_SCHEMA = {"anyOf": [{"type": "object", "additionalProperties": {"type": _PLAIN}}, {"type": "null"}]}

Prompts = Annotated[Any, BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
TokenIds = Annotated[Any, BeforeValidator(_token_ids), WithJsonSchema(_TOKEN_IDS)]
OptionalTokenIds = Annotated[
    Any,
    BeforeValidator(lambda value: () if value is None else _token_ids(value)),
    WithJsonSchema({"anyOf": [_TOKEN_IDS, {"type": "null"}]}),
]
Stop = Annotated[
    Any, BeforeValidator(lambda value: () if value is None else _stop(value)), WithJsonSchema(_STOP_SCHEMA)
]
LogitBias = Annotated[
    Any, BeforeValidator(lambda value: {} if value is None else _logit_bias(value)), WithJsonSchema(_BIAS_SCHEMA)
]
TemplateOptions = Annotated[
    Any,
    BeforeValidator(lambda value: {} if value is None else _template_options(value)),
    WithJsonSchema(_TEMPLATE_SCHEMA),
]


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]}
Content = Annotated[str, BeforeValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)]
