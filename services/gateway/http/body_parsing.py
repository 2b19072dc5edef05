"""Reads the bodies of requests in a thread; the lengths of lists are checked before anything looks at their entries."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, cast

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response

from spool.services.gateway.answers.tools import MOST_TOOLS
from spool.services.gateway.completion import CompletionEngine
from spool.services.gateway.errors import invalid
from spool.services.gateway.http.openai_errors import validation_error
from spool.services.gateway.options import check_counts, check_length
from spool.services.gateway.settings import Limits
from spool.services.text.bounded_json import check_size, read_json

# Of a message: of its content, and calls of functions in it.
_MOST_PARTS = 1024


def parsing_route(engine: CompletionEngine) -> type[APIRoute]:
    """The class of routes whose bodies are parsed and validated off the event loop."""

    class ParsingRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle
            adapter = TypeAdapter[Any](cast(Any, self.body_field.field_info.annotation))

            async def parse_and_handle(request: Request) -> Response:
                read = _ParsedRequest(request.scope, request.receive)
                body = await read.body()
                if body and "json" in request.headers.get("content-type", "").lower():
                    read.parsed = await engine.threads.run(parsed, body, adapter, engine.settings.limits)
                return await handle(read)

            return parse_and_handle

    return ParsingRoute


class _ParsedRequest(Request):
    """FastAPI takes the instance of the body's class as it is."""

    parsed: Any = None

    async def json(self) -> Any:
        return self.parsed


def parsed(body: bytes, adapter: TypeAdapter[Any], limits: Limits) -> Any:
    """The body as an instance of the adapter's class. Raises RequestError."""
    try:
        value = read_json(body.decode("utf-8-sig", "surrogatepass"))
    except json.JSONDecodeError as error:
        wrong = error.msg.removesuffix(" at")
        raise invalid(f"the body is not JSON: {wrong} at character {error.pos}", None, "invalid_value") from error
    except UnicodeDecodeError as error:
        raise invalid("the body cannot be read as JSON: it is not UTF-8", None) from error
    except ValueError as error:
        raise invalid(f"the body cannot be read as JSON: {error}", None) from error
    if isinstance(value, dict):
        _check_lengths(value, limits)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)) from error


def _check_lengths(body: Mapping[str, Any], limits: Limits) -> None:
    """Raises RequestError for a list whose entries each cost something. Token ids are checked by the model's limit."""
    check_counts(body)
    for name, most in (("tools", MOST_TOOLS), ("messages", limits.messages)):
        check_length(name, body.get(name), most)
    prompts = body.get("prompt")
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list):
        check_length("prompt", prompts, limits.sequences)
    messages, arguments = body.get("messages"), list[str]()
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            for name in ("content", "tool_calls"):
                check_length(f"messages.{index}.{name}", message.get(name), _MOST_PARTS)
            arguments += _arguments(message.get("tool_calls"))
    try:
        check_size(arguments)
    except ValueError as error:
        raise invalid(f"messages has arguments that are too large in all: {error}", "messages") from error


def _arguments(calls: Any) -> Iterator[str]:
    """The JSON texts in the calls of a message."""
    for call in calls if isinstance(calls, list) else ():
        match call:
            case {"function": {"arguments": str(text)}}:
                yield text
