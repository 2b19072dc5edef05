"""Reads one call of a function whose parts stand between tags, character by character."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

from spool.services.gateway.answers.call_scanner import Nesting
from spool.services.gateway.answers.formats import CallTags
from spool.services.gateway.answers.markers import SPACE, held_length
from spool.services.gateway.answers.schema_form import type_of
from spool.services.gateway.answers.tools import Tool

_LITERALS = {"True": "true", "False": "false", "None": "null"}
"""Some templates write values as Python does."""
_TEXT = frozenset({"string"})


class TagScanner:
    """Takes the characters of a call in the form of the `tags`, and makes its arguments a JSON object.

    `name` becomes known when the call has named one of the `tools` and its arguments have begun or ended. The call is
    `done` with its last tag.
    """

    def __init__(self, tags: CallTags, tools: Mapping[str, Tool]) -> None:
        self.name: str | None = None
        self.done = False
        self._tags = tags
        self._tools = tools
        self._named = ""
        self._key = ""
        self._text = ""
        self._types = _TEXT
        self._value: list[str] = []
        self._nesting: Nesting | None = None
        self._arguments: list[str] = []
        self._separator = ""
        self._expect({tags.name: self._in_name})

    def take_arguments(self) -> str:
        """The JSON text of the arguments that came since this method was called last."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def push(self, character: str) -> bool:
        """Whether the character can be part of a call here. After one that cannot, the scanner is of no more use."""
        fits = self._take(character)
        if not fits and self.name is not None and self._tags.key:
            self._arguments.append("}")
        return fits

    def _expect(self, tags: Mapping[str, Callable[[str], bool] | None]) -> None:
        """One of the tags, each with what takes the characters behind it; None for the call's end."""
        self._expected = {"".join(tag.split()): after for tag, after in tags.items()}
        self._take = self._expected.get("") or self._in_tag
        self._text = ""

    def _in_tag(self, character: str) -> bool:
        if character in SPACE and (not self._text or self._text[-1] == ">"):
            return True
        self._text += character
        if self._text not in self._expected:
            return any(tag.startswith(self._text) for tag in self._expected)
        after = self._expected[self._text]
        if after is not None:
            self._take, self._text = after, ""
            return True
        if self._tags.key:
            self._arguments.append("{}" if self.name is None else "}")
        self.name, self.done = self._named, True
        return True

    def _in_name(self, character: str) -> bool:
        if re.match(r"[\w-]", character):
            self._text += character
            return True
        self._named = self._text
        self._expect({self._tags.arguments: self._between if self._tags.key else self._in_object})
        return self._named in self._tools and self._take(character)

    def _in_object(self, character: str) -> bool:
        if self._nesting is None:
            if character != "{":
                return character in SPACE
            self.name, self._nesting = self._named, Nesting()
        self._arguments.append(character)
        self._nesting.push(character)
        if not self._nesting.depth:
            self._expect({self._tags.end: None})
        return True

    def _between(self, character: str) -> bool:
        """Before a further argument or the end."""
        self._expect({self._tags.key: self._in_key, self._tags.end: None})
        return self._take(character)

    def _in_key(self, character: str) -> bool:
        if self.name is None:
            self.name = self._named
            self._arguments.append("{")
        if character not in "<>":
            self._text += character
            return True
        self._key = self._text.strip()
        self._expect({self._tags.value: self._first_of_value})
        return self._take(character)

    def _first_of_value(self, character: str) -> bool:
        self._types = self._tools[self._named].argument_types(self._key)
        self._arguments.append(f'{self._separator}"{_quoted(self._key)}": ' + '"' * (self._types == _TEXT))
        self._separator = ", "
        self._value.clear()
        # The end may stand in a string.
        self._nesting = Nesting()
        self._take = self._in_value
        return (character == "\n" and self._tags.value.endswith("\n")) or self._take(character)

    def _in_value(self, character: str) -> bool:
        self._text += character
        if self._types != _TEXT and self._nesting is not None:
            self._nesting.push(character)
            if not self._nesting.depth and not self._nesting.in_text and character not in SPACE:
                # Neither an object, a list nor a string, or its end.
                self._nesting = None
        end = self._tags.value_end.strip()
        line_end = "\n" if self._tags.value_end.startswith("\n") else ""
        ended = self._text.endswith(end) and not (self._nesting and self._nesting.in_text)
        free = len(self._text) - max(held_length(self._text, one) for one in (end, line_end + end))
        self._value.append(self._text.removesuffix(end).removesuffix(line_end) if ended else self._text[:free])
        self._text = self._text[free:]
        if self._types == _TEXT:
            self._arguments.append(_quoted("".join(self._value)) + ('"' if ended else ""))
            self._value.clear()
        elif ended:
            self._arguments.append(self._json("".join(self._value)))
        if ended:
            self._take = self._between
        return True

    def _json(self, value: str) -> str:
        text = _LITERALS.get(value.strip(), value.strip())
        with suppress(ValueError, RecursionError):
            if type_of(json.loads(text, parse_constant=_refuse)) in self._types or "string" not in self._types:
                return text
        return f'"{_quoted(value)}"'


def _quoted(text: str) -> str:
    """Without the quotation marks."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
