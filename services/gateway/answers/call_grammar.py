"""Grammars of answers with calls of functions, in the form of the model's family."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.gateway.answers.formats import CallFormat
from services.gateway.answers.reasoning import THINK, THINK_END, Reasoning
from services.gateway.answers.tools import Tool, ToolUse
from services.gateway.structure import JSON_OPTIONS

TokenId = Callable[[str], int | None]
"""The id of a token by its text; None where the vocabulary has none."""


def calls_grammar(use: ToolUse, form: CallFormat, reasoning: Reasoning, token_id: TokenId) -> str:
    """Of an answer that calls functions and says nothing else, in Lark's form. All arguments fit their schemas.

    A model that reasons may do so first. A marker that is a token must be written as that token: the library does not
    match a special token by its text.
    """
    calls = "call"
    if form.several and use.parallel and use.name is None:
        calls = f"call ({_written(form.between, form, token_id)} call)*"
    before, after = (_written(text, form, token_id) for text in (form.before_all, form.after_all))
    before_each, after_each = (_written(text, form, token_id) for text in (form.before_each, form.after_each))
    thought, thought_rules = _thought(reasoning, token_id)
    rules = [
        f"start: {thought} {before} {calls} {after}",
        f"call: {before_each} any_call {after_each}",
        *thought_rules,
        *_tool_rules(use.callable_tools, form),
    ]
    return "\n".join(rules) + "\n"


def free_grammar(use: ToolUse, form: CallFormat, reasoning: Reasoning, token_id: TokenId) -> str:
    """Of an answer with free text and any number of calls, in Lark's form.

    Each call begins with the format's marker, and the arguments of strict functions fit their schemas. The free text
    never contains the marker, so nothing else can be read as a call.
    """
    tools = [tool if tool.strict else replace(tool, parameters={"type": "object"}) for tool in use.tools]
    thought, thought_rules = _thought(reasoning, token_id)
    begin, marker = token_id(form.begin), _pattern(form.begin)
    head, tail = (form.before_all + form.before_each).removeprefix(form.begin), form.after_each + form.after_all
    # A marker before each call makes each a block of its own.
    calls = "any_call"
    if form.before_all and use.parallel:
        calls = f"any_call ({_written(form.between, form, token_id)} any_call)*"
    rules = [
        f"start: {thought} (opening block){'*' if use.parallel else '?'} TEXT",
        f"block: {_written(head, form, token_id)} {calls} {_written(tail, form, token_id)}",
        f"opening[lazy]: /(?s:.*){marker}/" if begin is None else f"opening: TEXT <[{begin}]>",
        f"TEXT: /(?s:.*)/ & ~/(?s:.*){marker}(?s:.*)/",
        *thought_rules,
        *_tool_rules(tools, form),
    ]
    return "\n".join(rules) + "\n"


def _tool_rules(tools: Sequence[Tool], form: CallFormat) -> list[str]:
    """`any_call` is the object of a call, without markers around it."""
    rules = [f"any_call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        begin = f'{{"name": {json.dumps(tool.name)}, "{form.arguments_key}": '
        schema = tool.schema() | {"x-guidance": JSON_OPTIONS}
        rules.append(f'call_{number}: {json.dumps(begin)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    return rules


def _thought(reasoning: Reasoning, token_id: TokenId) -> tuple[str, list[str]]:
    """The reasoning that may come first, and the rules for it."""
    if reasoning is Reasoning.NONE:
        return "", []
    end = token_id(THINK_END)
    rules = [r"thought_end: /[ \t\r\n]{0,32}/"]
    if end is None:
        rules.append(f"thought[lazy]: /(?s:.*){_pattern(THINK_END)}/")
        thought = "thought thought_end"
    else:
        rules.append("thought: /(?s:.*)/")
        thought = f"thought <[{end}]> thought_end"
    if reasoning is Reasoning.OPEN:
        return thought, rules
    return f"({_marker(THINK, token_id)} {thought})?", rules


def _written(text: str, form: CallFormat, token_id: TokenId) -> str:
    """A text with markers in it, as a sequence of terminals."""
    markers = [re.escape(marker) for marker in (form.begin, form.end) if marker]
    parts = [part for part in re.split(f"({'|'.join(markers)})", text) if part]
    return " ".join(_marker(part, token_id) if part in (form.begin, form.end) else json.dumps(part) for part in parts)


def _marker(text: str, token_id: TokenId) -> str:
    token = token_id(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def _pattern(text: str) -> str:
    """A regular expression for the text, between slashes."""
    return re.escape(text).replace("/", r"\/")
