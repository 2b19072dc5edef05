"""What the output of a request must look like: OpenAI's field and vLLM's."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field, model_validator

from spool.services.gateway.http.openai_fields import (
    Body,
    JsonSchemaObject,
    JsonSchemaText,
    PlainText,
    PlainTexts,
    wrong,
)
from spool.services.gateway.structure import ANY_JSON_OBJECT, Structure


class JsonSchema(Body):
    name: str | None = None
    """Accepted, without effect."""
    description: str | None = None
    """Accepted, without effect."""
    schema_: JsonSchemaObject = Field(alias="schema")
    """What the output must fit."""
    strict: bool | None = None
    """The output fits the schema in any case."""


class ResponseFormat(Body):
    """What the output is. JSON ends with the model's end token, or in the middle where max_tokens are used up."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise wrong("must have a json_schema with the type json_schema, and only then")
        return self

    def structure(self) -> Structure | None:
        if self.type == "text":
            return None
        text = ANY_JSON_OBJECT if self.json_schema is None else self.json_schema.schema_
        return Structure("json_schema", text, "response_format")


class StructuredOutputs(Body):
    """vLLM's field: one of these."""

    json_: JsonSchemaText | None = Field(default=None, alias="json")
    """A JSON schema, or its text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: PlainText | None = None
    """Of the whole output."""
    choice: Annotated[PlainTexts, Field(min_length=1)] | None = None
    """The output is one of them."""
    grammar: PlainText | None = None
    """In Lark's form or in GBNF."""

    @model_validator(mode="after")
    def _check(self) -> StructuredOutputs:
        if len(self._given()) != 1:
            raise wrong("must have one of json, json_object, regex, choice and grammar")
        return self

    def _given(self) -> list[Structure]:
        given: list[Structure] = []
        if self.json_ is not None:
            given.append(Structure("json_schema", self.json_, "structured_outputs"))
        if self.json_object:
            given.append(Structure("json_schema", ANY_JSON_OBJECT, "structured_outputs"))
        if self.regex is not None:
            given.append(Structure("regex", self.regex, "structured_outputs"))
        if self.choice is not None:
            given.append(Structure("choice", json.dumps(self.choice), "structured_outputs"))
        if self.grammar is not None:
            given.append(Structure("grammar", self.grammar, "structured_outputs"))
        return given

    def structure(self) -> Structure:
        return self._given()[0]
