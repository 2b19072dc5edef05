"""Reads one call of a function whose parts stand between tags, character by character."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import NoReturn

from services.gateway.answers.call_scanner import Nesting
from services.gateway.answers.formats import CallTags
from services.gateway.answers.markers import SPACE, held_length
from services.gateway.answers.schema_form import type_of
from services.gateway.answers.tools import Tool

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
        self._arguments: list[str] = []
        self._count = 0
        self._types = _TEXT
        self._value: list[str] = []
        self._nesting: Nesting | None = None
        self._expect({tags.name: self._in_name})

    def take_arguments(self) -> str:
        """The JSON text of the arguments that came since this method was called last."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def push(self, character: str) -> bool:
        """Whether the character can be part of a call here. After one that cannot, the scanner is of no more use."""
        if self._take(character):
            return True
        if self.name is not None and self._tags.key:
            self._arguments.append("}")
        return False

    def _expect(self, tags: dict[str, Callable[[str], bool]]) -> None:
        """One of the tags, and what takes the characters behind it."""
        self._expected = {"".join(tag.split()): after for tag, after in tags.items()}
        self._take = self._expected.get("", self._in_tag)
        self._text = ""

    def _in_tag(self, character: str) -> bool:
        if character in SPACE and (not self._text or self._text[-1] == ">"):
            return True
        self._text += character
        if not any(tag.startswith(self._text) for tag in self._expected):
            return False
        if self._text in self._expected:
            self._take = self._expected[self._text]
            self._text = ""
            if self._take == self._after_end:
                self._end()
            elif self._take == self._in_key:
                self._begin()
        return True

    def _in_name(self, character: str) -> bool:
        if re.match(r"[\w-]", character):
            self._text += character
            return True
        self._named = self._text
        self._expect({self._tags.arguments: self._in_object if not self._tags.key else self._between})
        return self._named in self._tools and self._take(character)

    def _between(self, character: str) -> bool:
        """Before a further argument or the end."""
        self._expect({self._tags.key: self._in_key, self._tags.end: self._after_end})
        return self._take(character)

    def _in_key(self, character: str) -> bool:
        if character not in "<>":
            self._text += character
            return True
        self._key = self._text.strip()
        self._expect({self._tags.value: self._first_of_value})
        return self._take(character)

    def _first_of_value(self, character: str) -> bool:
        self._arguments.append(f"{', ' if self._count else ''}{json.dumps(self._key, ensure_ascii=False)}: ")
        self._count += 1
        self._types = self._tools[self._named].argument_types(self._key)
        self._value.clear()
        self._nesting = None
        if self._types == _TEXT:
            self._arguments.append('"')
        self._take = self._in_value
        return (character == "\n" and self._tags.value.endswith("\n")) or self._take(character)

    def _in_value(self, character: str) -> bool:
        self._text += character
        if self._nesting is None and self._types != _TEXT and character in '"{[' and not "".join(self._value).strip():
            self._nesting = Nesting()
        if self._nesting is not None:
            # The end may stand in a string.
            self._nesting.push(character)
        end = self._tags.value_end.strip()
        line_end = "\n" if self._tags.value_end.startswith("\n") else ""
        ended = self._text.endswith(end) and not (self._nesting and self._nesting.in_text)
        if ended:
            self._value.append(self._text.removesuffix(end).removesuffix(line_end))
        else:
            free = len(self._text) - max(held_length(self._text, one) for one in (end, line_end + end))
            self._value.append(self._text[:free])
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
        text = value.strip()
        text = _LITERALS.get(text, text)
        try:
            found = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return f'"{_quoted(value)}"'
        return f'"{_quoted(value)}"' if "string" in self._types and type_of(found) not in self._types else text

    def _in_object(self, character: str) -> bool:
        if self._nesting is None:
            if character != "{":
                return character in SPACE
            self._nesting = Nesting()
            self.name = self._named
        self._arguments.append(character)
        self._nesting.push(character)
        if not self._nesting.depth:
            self._expect({self._tags.end: self._after_end})
        return True

    def _begin(self) -> None:
        if self.name is None:
            self.name = self._named
            self._arguments.append("{")

    def _end(self) -> None:
        if self._tags.key:
            self._begin()
            self._arguments.append("}")
        self.done = True

    def _after_end(self, character: str) -> bool:
        return False


def _quoted(text: str) -> str:
    """Without the quotation marks."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
