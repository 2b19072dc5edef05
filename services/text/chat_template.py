"""Chat templates, rendered as transformers renders them.

transformers' own renderer is not used: importing `transformers.utils.chat_template_utils` loads transformers, which
takes a gateway a second at its start; this module takes 0.05 s. A test compares the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from spool.scheduler.errors import SpoolError

_END_OF_CONTENT = "\ue000end of content\ue001"
"""Put behind a message that is to be continued, to find where a template's text of it ends."""
_NO_OPTIONS = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
_MARK = "\ue000unparsed {}\ue001"
"""Stands for an unparsed text while JSON is written."""


class ChatTemplateError(SpoolError, ValueError):
    """The template does not accept the messages; the error's message is one line that a client can act on."""


class UnparsedArguments(str):
    """Arguments of a call that are not the JSON text of an object: a template writes the text as it is, with `tojson`
    too. A template that fails on a text gets an empty object."""


class ChatTemplate:
    """One compiled template with the special tokens that the template may name (`bos_token`, `eos_token`, ...).

    Templates come with models and are not trusted: they run in jinja2's immutable sandbox. Raises ChatTemplateError.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str | None]) -> None:
        """None for a special token that the model is known not to have: its text is empty."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=_UnknownToken,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = {
            name: jinja2.Undefined(name=name) if text is None else text for name, text in special_tokens.items()
        }
        try:
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
            names = parsed.find_all(jinja2.nodes.Name)
            read = jinja2.meta.find_undeclared_variables(parsed)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template does not compile: {_line(error)}") from error
        self.source = source
        self.takes_tools = any(name.name == "tools" and name.ctx == "load" for name in names)
        """Whether the template does something with tools."""
        self.options = frozenset(read - environment.globals.keys() - _NO_OPTIONS)
        """What else a request can give the template, such as `enable_thinking`."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation; `variables` go to the template unchanged (`enable_thinking` ...).

        With `continue_final_message`, the text ends with the content of the last message, for the model to go on.
        """
        if continue_final_message:
            last = {**messages[-1], "content": messages[-1]["content"] + _END_OF_CONTENT}
            text = self.render([*messages[:-1], last], add_generation_prompt=False, tools=tools, **variables)
            content, found, _ = text.rpartition(_END_OF_CONTENT)
            if not found:
                raise ChatTemplateError("the model's chat template does not write the last message, to be continued")
            return content
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt, **variables}
        try:
            return self._write(messages, options)
        except ChatTemplateError:
            # Some templates go through arguments, which must be an object then; others want the text.
            for change in (_as_object, _as_text):
                changed = [_with_arguments(message, change) for message in messages]
                with suppress(ChatTemplateError):
                    if changed != list(messages):
                        return self._write(changed, options)
            raise

    @cached_property
    def takes_several_calls(self) -> bool:
        """Whether the template writes two calls in one message where it writes one."""
        return self._writes_calls(2) or not self._writes_calls(1)

    def _writes_calls(self, count: int) -> bool:
        function = {"name": "f", "arguments": {}}
        calls = [{"id": f"call{number:05}", "type": "function", "function": function} for number in range(count)]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            self.render([{"role": "user", "content": "a"}, answer], add_generation_prompt=False)
        except ChatTemplateError:
            return False
        return True

    def _write(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        try:
            return self._template.render({**self._special_tokens, "messages": messages, "documents": None, **options})
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template refuses the messages: {_line(error)}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # A template fails in many ways on messages of a form that its author did not foresee.
            raise ChatTemplateError(f"the model's chat template fails on the messages: {_line(error)}") from error


class _UnknownToken(jinja2.Undefined):
    """A special token of which the model's files say nothing may be asked for, but not written."""

    def __str__(self) -> str:
        if self._undefined_name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            raise jinja2.UndefinedError(f"no file of the model says what {self._undefined_name} is")
        return super().__str__()


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; rendering keeps the content and drops the tag."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _with_arguments(message: Mapping[str, Any], change: Callable[[Any], Any]) -> Mapping[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _as_object(arguments: Any) -> Any:
    return {} if isinstance(arguments, UnparsedArguments) else arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, and no model was trained on escaped HTML."""
    unparsed: list[str] = []
    text = json.dumps(
        _marked(value, unparsed),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    if not unparsed:
        return text
    before, after = (re.escape(part) for part in json.dumps(_MARK, ensure_ascii=ensure_ascii).split("{}"))
    # A text may look like a mark.
    numbers = {str(number): arguments for number, arguments in enumerate(unparsed)}
    return re.sub(f"{before}([0-9]+){after}", lambda found: numbers.get(found[1], found[0]), text)


def _marked(value: Any, unparsed: list[str]) -> Any:
    """The value with a mark in place of each unparsed text, which is added to `unparsed`."""
    if isinstance(value, UnparsedArguments):
        unparsed.append(value)
        return _MARK.format(len(unparsed) - 1)
    if isinstance(value, Mapping):
        return {key: _marked(inner, unparsed) for key, inner in value.items()}
    return [_marked(inner, unparsed) for inner in value] if isinstance(value, list | tuple) else value


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
