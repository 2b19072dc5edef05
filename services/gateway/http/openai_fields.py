"""Fields of OpenAI's requests that come in several forms.

pydantic checks lists and numbers. Unions are checked here: pydantic reports one error for each member of a union, and
a client cannot tell which of these errors is about the form that the client meant.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from spool.services.gateway.options import Prompt, TextPrompt, TokenPrompt, shown

_TEMPLATE_NAMES = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "strftime_now")
}

# Whether a token is in the vocabulary is checked where the vocabulary is known.
_TokenId = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
_Texts = Annotated[list[str], Field(min_length=1)]
_Tokens = Annotated[list[_TokenId], Field(min_length=1)]


class Body(BaseModel):
    """A request, or an object in one. A field that is null counts as not given; other unknown fields are refused."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        given = {name: body[name] for name in fields if name in body}
        given = {name: value for name, value in given.items() if value is not None or fields[name].is_required()}
        unknown = next((name for name, value in body.items() if value is not None and name not in fields), None)
        if unknown is None:
            return given
        if unknown.isprintable():
            raise PydanticCustomError("unknown_field", "is not a known field", {"param": unknown, "known": [*fields]})
        return {**given, unknown: body[unknown]}


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class RefusalPart(BaseModel):
    """A part of a message in which the assistant refused."""

    type: Literal["refusal"]
    refusal: str


def wrong(message: str, param: str | None = None) -> PydanticCustomError:
    """The error for a validator to raise.

    Errors of one field begin with the field's name, which is put before `message`. `param` is the name of a field
    within the object that is validated; of a whole body, `message` names it too.
    """
    # pydantic would fill in the braces of a message.
    return PydanticCustomError("wrong_form", "{message}", {"message": message, "param": param})


def _prompts(value: object) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (TextPrompt(check_text(value)),)
    if not isinstance(value, list) or not value:
        raise wrong(f"is {shown(value)}, must be text, token ids, or a list of either")
    if all(isinstance(entry, str) for entry in value):
        return tuple(TextPrompt(check_text(entry)) for entry in value)
    if all(isinstance(entry, list) for entry in value):
        return tuple(_token_prompt(entry) for entry in value)
    return (_token_prompt(value),)


def _token_prompt(value: list[Any]) -> TokenPrompt:
    for index, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool):
            raise wrong(f"holds {shown(token)} at index {index}, must be token ids")
    return TokenPrompt(tuple(value))


def check_text(value: str) -> str:
    """Raises an error for a validator to raise unless the text is one of whole characters."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise wrong("holds half a surrogate pair, which is no character") from error
    return value


def _json_text(value: object) -> str:
    """The text of a JSON object."""
    if not isinstance(value, dict):
        raise wrong(f"is {shown(value)}, must be an object")
    return _dumped(value, ensure_ascii=True)


def check_json(value: dict[str, Any]) -> None:
    """Raises an error for a validator to raise unless the object's text can be put into a prompt."""
    check_text(_dumped(value, ensure_ascii=False))


def _dumped(value: dict[str, Any], ensure_ascii: bool) -> str:
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=ensure_ascii)
    except ValueError as error:
        raise wrong("holds a number that is not finite") from error
    except RecursionError as error:
        raise wrong("is nested too deeply") from error


def _json_text_given(value: object) -> str:
    return check_text(value) if isinstance(value, str) else _json_text(value)


def _token_id_key(value: object) -> int:
    """JSON has only text as keys."""
    if not (isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10):
        raise wrong("is no token id")
    return int(value)


def _stop(value: object) -> object:
    if value is None or isinstance(value, str):
        return [] if value is None else [value]
    if not isinstance(value, list):
        raise wrong(f"is {shown(value)}, must be a text or a list of texts")
    return value


def _template_options(value: object) -> object:
    """Plain values, under names that the template does not get from elsewhere."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(f"is {shown(value)}, must be an object")
    for key, option in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isidentifier()) or key in _TEMPLATE_NAMES:
            raise wrong(f"has the key {shown(key)}, which is no option of a template")
        plain = option is None or isinstance(option, bool | int | str)
        if not plain and not (isinstance(option, float) and math.isfinite(option)):
            raise wrong(f"{key} is {shown(option)}, must be a text, a number, true, false or null")
        if isinstance(option, str):
            check_text(option)
    return value


def _content(value: object) -> str:
    """Joins the parts of a text: templates of text models expect a single text."""
    if isinstance(value, list):
        texts = []
        for index, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else None
            text = part.get(kind) if isinstance(part, dict) and kind in ("text", "refusal") else None
            if not isinstance(text, str):
                raise wrong(f'has {shown(part)} at index {index}, must be {{"type": "text", "text": ...}}')
            texts.append(text)
        value = "\n".join(texts)
    if not isinstance(value, str):
        raise wrong(f"is {shown(value)}, must be a text or a list of text parts")
    return check_text(value)


def _whole(value: object) -> object:
    """Some clients write whole numbers with a point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _none_is(empty: list[Any] | dict[Any, Any], form: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: empty if value is None else value, json_schema_input_type=form | None)


_Bias = Annotated[float, Field(ge=-100, le=100)]
_Plain = str | float | bool | None

Prompts = Annotated[
    Any,
    BeforeValidator(
        _prompts, json_schema_input_type=str | _Texts | _Tokens | Annotated[list[_Tokens], Field(min_length=1)]
    ),
]
PlainText = Annotated[str, AfterValidator(check_text)]
CacheSalt = Annotated[str, Field(min_length=1), AfterValidator(check_text)]
WholeNumber = Annotated[int, BeforeValidator(_whole, json_schema_input_type=int)]
CountOfTokens = Annotated[int, Field(ge=0), BeforeValidator(_whole, json_schema_input_type=Annotated[int, Field(ge=0)])]
JsonSchemaObject = Annotated[str, BeforeValidator(_json_text, json_schema_input_type=dict[str, Any])]
JsonSchemaText = Annotated[str, BeforeValidator(_json_text_given, json_schema_input_type=dict[str, Any] | str)]
PlainTexts = Annotated[list[PlainText], Field(fail_fast=True)]
TokenIds = Annotated[list[_TokenId], Field(fail_fast=True)]
OptionalTokenIds = Annotated[TokenIds, _none_is([], TokenIds)]
OptionalTexts = Annotated[PlainTexts, _none_is([], PlainTexts)]
Stop = Annotated[PlainTexts, BeforeValidator(_stop, json_schema_input_type=str | list[str] | None)]
LogitBias = Annotated[dict[Annotated[int, BeforeValidator(_token_id_key)], _Bias], _none_is({}, dict[str, _Bias])]
TemplateOptions = Annotated[
    dict[str, Any], BeforeValidator(_template_options, json_schema_input_type=dict[str, _Plain] | None)
]
Content = Annotated[str, BeforeValidator(_content, json_schema_input_type=str | list[TextPart | RefusalPart])]
