"""The grammar of an answer that calls functions and says nothing else, in the form of the model's family."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from services.gateway.answers.formats import CallFormat
from services.gateway.answers.reasoning import THINK, THINK_END, Reasoning
from services.gateway.answers.tools import Tool, ToolUse
from services.gateway.structure import JSON_WHITE_SPACE

TokenId = Callable[[str], int | None]
"""The id of a token by its text; None where the vocabulary has none."""


def calls_grammar(use: ToolUse, form: CallFormat, reasoning: Reasoning, token_id: TokenId) -> str:
    """In Lark's form. The arguments of each call fit the schema of its function.

    A model that thinks may do so first. Markers that are tokens are these tokens and nothing else: the library never
    takes the text of a special token for the token.
    """
    tools = use.callable_tools
    calls = "call"
    if form.several and use.parallel and use.name is None:
        calls = f"call ({_written(form.between, form, token_id)} call)*"
    before, after = (_written(text, form, token_id) for text in (form.before_all, form.after_all))
    before_each, after_each = (_written(text, form, token_id) for text in (form.before_each, form.after_each))
    thought, thought_rules = _thought(reasoning, token_id)
    rules = [
        f"start: {thought} {before} {calls} {after}",
        f"call: {before_each} ({' | '.join(f'call_{number}' for number in range(len(tools)))}) {after_each}",
        *thought_rules,
    ]
    for number, tool in enumerate(tools):
        rules += _tool_rules(number, tool, form)
    return "\n".join(rules) + "\n"


def _tool_rules(number: int, tool: Tool, form: CallFormat) -> list[str]:
    begin = f'{{"name": {json.dumps(tool.name)}, "{form.arguments_key}": '
    schema = tool.schema() | {"x-guidance": {"whitespace_pattern": JSON_WHITE_SPACE}}
    return [
        f'call_{number}: {json.dumps(begin)} arguments_{number} "}}"',
        f"arguments_{number}: %json {json.dumps(schema)}",
    ]


def _thought(reasoning: Reasoning, token_id: TokenId) -> tuple[str, list[str]]:
    """What may come before the calls, and the rules for that."""
    if reasoning is Reasoning.NONE:
        return "", []
    end = token_id(THINK_END)
    rules = [r"thought_end: /[ \t\r\n]{0,32}/"]
    if end is None:
        rules.append(rf"thought[lazy]: /(?s:.*){re.escape(THINK_END).replace('/', chr(92) + '/')}/")
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
