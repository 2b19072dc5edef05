"""Reads one call of a function, a JSON object, character by character."""

from __future__ import annotations

import json
from collections.abc import Container
from enum import Enum, auto
from typing import Any

from spool.services.gateway.answers.markers import SPACE

_ARGUMENTS = ("arguments", "parameters")


class Nesting:
    """Follows the text of a JSON value: how many objects and lists are open, and whether a string is."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_text = False
        self._escaped = False

    def push(self, character: str) -> None:
        if self.in_text:
            if self._escaped or character == "\\":
                self._escaped = not self._escaped
            elif character == '"':
                self.in_text = False
        elif character == '"':
            self.in_text = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1


class _At(Enum):
    """What comes next in the object, or what is being read."""

    BEGIN = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()
    KEY_TEXT = auto()
    TEXT = auto()
    NESTED = auto()
    SCALAR = auto()


class CallScanner:
    """Takes the characters of `{"name": "f", "arguments": {...}}`; the keys may come in any order, among others.

    `name` becomes known when the object has named one of `names` and its arguments have begun. The object is `done`
    with its closing brace.
    """

    def __init__(self, names: Container[str], arguments_needed: bool) -> None:
        """Unless `arguments_needed`, an object without arguments is a call with empty arguments."""
        self.name: str | None = None
        self.done = False
        self._names = names
        self._arguments_needed = arguments_needed
        self._at = _At.BEGIN
        self._named: str | None = None
        self._has_arguments = False
        self._arguments: list[str] = []
        self._in_arguments = False
        self._key = ""
        self._value: list[str] = []
        self._nesting = Nesting()

    def take_arguments(self) -> str:
        """The text of the arguments that came since this method was called last, exactly as it stands in the object."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def push(self, character: str) -> bool:
        """Whether the character can be part of a call here. After one that cannot, the scanner is of no more use."""
        if not self._step(character):
            return False
        if self._named is not None and self._has_arguments:
            self.name = self._named
        return True

    def _step(self, character: str) -> bool:
        match self._at:
            case _At.KEY_TEXT | _At.TEXT:
                return self._in_string(character)
            case _At.NESTED:
                return self._in_nested(character)
            case _At.SCALAR if character not in ",}" and character not in SPACE:
                self._value.append(character)
                return True
            case _At.SCALAR:
                if not self._take_value():
                    return False
                self._at = _At.COMMA
        if character in SPACE:
            return self._at is not _At.BEGIN
        match self._at, character:
            case _At.BEGIN, "{":
                self._at = _At.FIRST_KEY
            case ((_At.FIRST_KEY | _At.KEY), '"'):
                self._begin_value(_At.KEY_TEXT, character)
            case _At.COLON, ":":
                self._at = _At.VALUE
            case _At.VALUE, '"':
                self._begin_value(_At.TEXT, character)
            case _At.VALUE, ("{" | "["):
                self._begin_value(_At.NESTED, character)
                self._in_arguments = character == "{" and self._for_arguments
                if self._in_arguments:
                    self._give_arguments(character)
            case _At.VALUE, _ if character not in ",:}]":
                self._begin_value(_At.SCALAR, character)
            case _At.COMMA, ",":
                self._at = _At.KEY
            case ((_At.FIRST_KEY | _At.COMMA), "}"):
                return self._end()
            case _:
                return False
        return True

    @property
    def _for_arguments(self) -> bool:
        return self._key in _ARGUMENTS and not self._has_arguments

    def _begin_value(self, at: _At, character: str) -> None:
        self._at = at
        self._value = [character]
        self._nesting = Nesting()
        self._nesting.push(character)

    def _give_arguments(self, text: str) -> None:
        self._has_arguments = True
        self._arguments.append(text)

    def _in_string(self, character: str) -> bool:
        self._value.append(character)
        self._nesting.push(character)
        if self._nesting.in_text:
            return True
        if self._at is _At.KEY_TEXT:
            self._at = _At.COLON
            key = self._parsed_value()
            self._key = key if isinstance(key, str) else ""
            return isinstance(key, str)
        self._at = _At.COMMA
        return self._take_value()

    def _in_nested(self, character: str) -> bool:
        if self._in_arguments:
            self._arguments.append(character)
        self._nesting.push(character)
        if self._nesting.depth == 0:
            self._at = _At.COMMA
            # Neither a name nor arguments are lists.
            return self._in_arguments or (self._key != "name" and not self._for_arguments)
        return True

    def _take_value(self) -> bool:
        """Takes a complete value that is neither object nor list. Some models write arguments as a string with JSON."""
        if self._key == "name" and self._named is None:
            name = self._parsed_value()
            if not isinstance(name, str) or name not in self._names:
                return False
            self._named = name
        elif self._for_arguments:
            value = self._parsed_value()
            if isinstance(value, str) and isinstance(_parsed(value), dict):
                self._give_arguments(value)
            elif value is None and self._value == list("null"):
                self._give_arguments("{}")
            else:
                return False
        return True

    def _end(self) -> bool:
        if self._named is None or (self._arguments_needed and not self._has_arguments):
            return False
        if not self._has_arguments:
            self._give_arguments("{}")
        self.done = True
        return True

    def _parsed_value(self) -> Any:
        return _parsed("".join(self._value))


def _parsed(text: str) -> Any:
    """None where the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
