"""Grammars of answers with calls of functions, in the form of the model's family."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from spool.services.gateway.answers.formats import MARKER, CallFormat, CallTags
from spool.services.gateway.answers.reasoning import THINK, THINK_END, Reasoning
from spool.services.gateway.answers.schema_form import referenced, value_types
from spool.services.gateway.answers.tools import Tool, ToolUse
from spool.services.gateway.structure import JSON_OPTIONS

TokenId = Callable[[str], int | None]
"""The id of a token by its text; None where the vocabulary has none."""

_KEY = re.compile(r"[^<>\s]([^<>\n]*[^<>\s])?")
"""Names that can stand between tags."""

_CHOICES = frozenset({"anyOf", "oneOf", "not", "if"})
_OF_WHOLE_OBJECTS = _CHOICES | {
    *("$ref", "allOf", "enum", "const", "patternProperties", "propertyNames", "minProperties", "maxProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
}
"""What holds for several arguments."""


def calls_grammar(
    use: ToolUse, form: CallFormat, reasoning: Reasoning, token_id: TokenId, or_content: bool = False
) -> str:
    """Of an answer that calls functions and says nothing else, in Lark's form. All arguments fit their schemas; with
    `or_content`, those of strict functions, and the answer may be the grammar `@content` instead.

    A model that reasons may do so first. A marker that is a token must be written as that token: the library does not
    match a special token by its text.
    """
    calls = "call"
    if use.parallel and use.name is None:
        calls = f"call ({_written(form.between, token_id)} call)*"
    # Calls without a marker could not be told from content.
    begin = form.begin if or_content and not form.before_all + form.before_each else form.before_all
    texts = (begin, form.after_all, form.before_each, form.after_each)
    before, after, before_each, after_each = (_written(text, token_id) for text in texts)
    thought, thought_rules = _thought(reasoning, token_id)
    rules = [
        f"start: {thought} ({before} {calls} {after}{' | @content' if or_content else ''})",
        f"call: {before_each} any_call {after_each}",
        *thought_rules,
        *_tool_rules(_freed(use.tools) if or_content else use.callable_tools, form, token_id),
    ]
    return "\n".join(rules) + "\n"


def content_grammar(reasoning: Reasoning, token_id: TokenId) -> str:
    """Of an answer that is the grammar `@content`; reasoning may come first."""
    thought, thought_rules = _thought(reasoning, token_id)
    return "\n".join([f"start: {thought} @content", *thought_rules]) + "\n"


def free_grammar(use: ToolUse, form: CallFormat, reasoning: Reasoning, token_id: TokenId) -> str:
    """Of an answer with free text and any number of calls, in Lark's form.

    Each call begins with the format's marker, and the arguments of strict functions fit their schemas. The free text
    never contains the marker, so nothing else can be read as a call.
    """
    thought, thought_rules = _thought(reasoning, token_id)
    begin, marker = token_id(form.begin), _pattern(form.begin)
    head, tail = (form.before_all + form.before_each).removeprefix(form.begin), form.after_each + form.after_all
    # A marker before each call makes each a block of its own.
    calls = "any_call"
    if form.before_all and use.parallel:
        calls = f"any_call ({_written(form.between, token_id)} any_call)*"
    rules = [
        f"start: {thought} (opening block){'*' if use.parallel else '?'} TEXT",
        f"block: {_written(head, token_id)} {calls} {_written(tail, token_id)}",
        f"opening[lazy]: /(?s:.*){marker}/" if begin is None else f"opening: TEXT <[{begin}]>",
        f"TEXT: {_without(form.begin)}",
        *thought_rules,
        *_tool_rules(_freed(use.tools), form, token_id),
    ]
    return "\n".join(rules) + "\n"


def held_fault(tool: Tool, form: CallFormat) -> str | None:
    """Why calls in this form cannot be held to the function's schema; None where they can."""
    try:
        _tool_rules([tool], form, lambda _: None)
    except ValueError as error:
        return f"{error}, to which calls in the model's form cannot be held"
    return None


def _freed(tools: Sequence[Tool]) -> list[Tool]:
    """Functions that are not strict take anything."""
    return [tool if tool.strict else replace(tool, parameters={"type": "object"}) for tool in tools]


def _tool_rules(tools: Sequence[Tool], form: CallFormat, token_id: TokenId) -> list[str]:
    """`any_call` is a call without what stands around all of them."""
    rules = [f"any_call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        tags = form.tags
        if tags is None:
            begin = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{form.arguments_key}": ')
            end = '"}"'
        else:
            begin, end = _written(f"{tags.name}{tool.name}{tags.arguments}", token_id), _written(tags.end, token_id)
        arguments = f"arguments_{number}"
        rules.append(f"call_{number}: {begin} {arguments} {end}")
        if tags is None or not tags.key:
            rules.append(f"{arguments}: {_json(tool.schema())}")
        else:
            rules += _pair_rules(arguments, tool.schema(), tags, token_id)
    return rules


def _pair_rules(arguments: str, schema: Mapping[str, Any], tags: CallTags, token_id: TokenId) -> list[str]:
    """Of arguments one by one, in the order of the properties; any others only where there are no properties. Raises
    ValueError."""
    properties, further = schema.get("properties", {}), schema.get("additionalProperties", True)
    required = schema.get("required", ())
    for name in [*(_OF_WHOLE_OBJECTS & schema.keys()), *(set(required) - properties.keys())]:
        raise ValueError(f"it has {name if name in schema else f'required {name!r}'}")
    pairs, rules = [], list[str]()
    for number, (name, value) in enumerate(properties.items()):
        if not _KEY.fullmatch(name):
            raise ValueError(f"it has the property {name!r}")
        pair = f"{arguments}_{number}"
        pairs.append(pair if name in required else f"{pair}?")
        rules.append(f"{pair}: {_written(f'{tags.key}{name}{tags.value}', token_id)} {pair}_value")
        rules += _value_rules(f"{pair}_value", schema, value, tags, token_id)
    if not properties and further is not False:
        pairs = [f"{arguments}_further*"]
        key = f"{_written(tags.key, token_id)} /{_KEY.pattern}/ {_written(tags.value, token_id)}"
        rules.append(f"{arguments}_further: {key} {arguments}_value")
        rules += _value_rules(f"{arguments}_value", schema, further, tags, token_id)
    return [f"{arguments}: {' '.join(pairs)}", *rules]


def _value_rules(rule: str, schema: Mapping[str, Any], value: Any, tags: CallTags, token_id: TokenId) -> list[str]:
    """Of the value of an argument and the tag behind it. Raises ValueError."""
    if value not in (True, {}) and value_types(schema, value) != {"string"}:
        if "$ref" in json.dumps(value):
            value = {**value, **{name: schema[name] for name in ("$defs", "definitions") if name in schema}}
        return [f"{rule}: {_json(value)} {_written(tags.value_end, token_id)}"]
    end, terminal = tags.value_end.strip(), rule.upper()
    before, _, after = tags.value_end.partition(end)
    text = " & ".join([*_conditions(schema, value), _without(end)])
    # Where the tag is no token, the text must not go on with it.
    lazy = "[lazy]" if token_id(end) is None else ""
    return [
        f"{rule}{lazy}: {terminal} {_written(end + after, token_id)}",
        f"{terminal}: ({text}) {_written(before, token_id)}",
    ]


def _conditions(schema: Mapping[str, Any], value: Any) -> Iterator[str]:
    """Terminals, all of which a text must match that fits `value`, a part of the schema. Raises ValueError."""
    waiting, seen = [value], set[int]()
    while waiting:
        value = waiting.pop()
        if value is False:
            raise ValueError("it has false for texts")
        if not isinstance(value, Mapping) or id(value) in seen:
            continue
        seen.add(id(value))
        texts = [value["const"]] if "const" in value else value.get("enum")
        if texts is not None:
            written = [json.dumps(text, ensure_ascii=False) for text in texts if isinstance(text, str)]
            if not written:
                raise ValueError("it has no text among constants for texts")
            yield f"({' | '.join(written)})"
        if "minLength" in value or "maxLength" in value:
            least, most = int(value.get("minLength", 0)), value.get("maxLength")
            yield f"/(?s:.{{{least},{'' if most is None else int(most)}}})/"
        if "pattern" in value:
            yield f"/{_whole_pattern(value['pattern'])}/"
        for name in _CHOICES & value.keys():
            raise ValueError(f"it has {name} for texts")
        waiting += [referenced(schema, value), *value.get("allOf", ())]


def _whole_pattern(pattern: str) -> str:
    """The pattern of all texts in which a JSON schema would find this one. Raises ValueError where an anchor is for a
    part of the pattern."""
    found = re.fullmatch(r"(\^?)(.*?)((?<!\\)\$?)", str(pattern), re.DOTALL)
    begin, inner, end = found.groups() if found else ("", "^", "")
    bare = re.sub(r"\\.|\[\^?\]?[^]]*\]?", "", inner)
    depths = accumulate((character == "(") - (character == ")") for character in bare)
    alternatives = any(character == "|" and not depth for character, depth in zip(bare, depths, strict=True))
    if re.search(r"[$^]", bare) or (alternatives and (begin or end)):
        raise ValueError(f"it has the pattern {pattern[:60]!r}")
    inner = re.sub(r"\\.|/", lambda part: r"\/" if part[0] == "/" else part[0], inner).replace("\n", r"\n")
    return f"{'' if begin else '(?s:.*)'}(?:{inner}){'' if end else '(?s:.*)'}"


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
        rules.append(f"THOUGHT: {_without(THINK_END)}")
        thought = f"THOUGHT <[{end}]> thought_end"
    if reasoning is not Reasoning.POSSIBLE:
        return thought, rules
    return f"({_marker(THINK, token_id)} {thought})?", rules


def _written(text: str, token_id: TokenId) -> str:
    """A text with markers in it, as a sequence of terminals."""
    parts = re.split(f"({MARKER.pattern})", text)
    return " ".join(_marker(part, token_id) for part in parts if part)


def _marker(text: str, token_id: TokenId) -> str:
    token = token_id(text) if MARKER.fullmatch(text) else None
    return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"


def _json(schema: Any) -> str:
    # Options matter for texts and white space only.
    if isinstance(schema, Mapping) and schema.get("type") not in ("integer", "number", "boolean"):
        schema = {**schema, "x-guidance": JSON_OPTIONS}
    return f"%json {json.dumps(schema)}"


def _without(text: str) -> str:
    """A terminal for any text without this one in it."""
    return f"/(?s:.*)/ & ~/(?s:.*){_pattern(text)}(?s:.*)/"


def _pattern(text: str) -> str:
    """A regular expression for the text, between slashes."""
    return re.escape(text).replace("/", r"\/")
