"""Splits an answer into calls of functions and the text around them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from enum import Enum, auto

from spool.services.gateway.answers.call_scanner import CallScanner
from spool.services.gateway.answers.deltas import AnswerDelta, ArgumentsDelta, CallDelta, ContentDelta
from spool.services.gateway.answers.formats import CallFormat
from spool.services.gateway.answers.markers import SPACE, held_length
from spool.services.gateway.answers.tag_scanner import TagScanner
from spool.services.gateway.answers.tools import Tool

_BETWEEN_CALLS = f"{SPACE},;[]"


class _State(Enum):
    TEXT = auto()
    BLOCK = auto()
    CALL = auto()


class ToolCallParser:
    """Finds the calls in a text that comes in pieces; the result does not depend on the pieces.

    A call is certain once it has named a known function and its arguments have begun. From then on its arguments
    pass through unchanged. What begins like a call and turns out to be none stays text, unchanged. Text that may still
    become a call is held back, and so is white space, which is dropped next to a call.
    """

    def __init__(
        self, form: CallFormat, tools: Iterable[Tool], hidden: Container[str] = (), either: bool = False
    ) -> None:
        """`tools` are the functions. Markers in `hidden` are dropped where text stays text. `either`: an answer that
        begins with text has no calls."""
        self.cut = False
        """Whether the answer has ended within a call."""
        self._form = form
        self._tools = {tool.name: tool for tool in tools}
        self._hidden = [marker for marker in form.markers if marker in hidden]
        self._either = either
        self._calls = 0
        self._state = _State.TEXT
        self._buffer = ""
        self._space = ""
        self._spoken = False
        self._after_call = False
        self._block: list[str] = []
        """The part of a block of calls that becomes text unless a call follows."""
        self._block_calls = 0
        self._scanner = self._new_scanner()
        self._deltas: list[AnswerDelta] = []

    def push(self, piece: str) -> list[AnswerDelta]:
        """What has become certain."""
        self._buffer += piece
        while self._step():
            pass
        return self._taken()

    def finish(self) -> list[AnswerDelta]:
        """The text that was held back, at the end of the answer. A call that is certain stays one, even if cut off."""
        self.cut = self._state is _State.CALL and self._scanner.name is not None
        if self._state is _State.TEXT:
            self._say(self._buffer)
        else:
            if not self._block_calls:
                self._block.append(self._buffer)
            self._say_block()
        if not self._calls:
            self._deltas.append(ContentDelta(self._space))
        self._buffer = ""
        return self._taken()

    def _taken(self) -> list[AnswerDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _step(self) -> bool:
        """Consumes the text in the buffer that is certain; returns whether there is more to do."""
        match self._state:
            case _State.TEXT:
                return self._step_text()
            case _State.BLOCK:
                return self._step_block()
            case _State.CALL:
                return self._step_call()

    def _step_text(self) -> bool:
        if self._either and not self._calls:
            begin = self._buffer.lstrip(SPACE)
            if self._spoken or not self._form.begin.startswith(begin[: len(self._form.begin)]):
                self._say(self._buffer)
                self._buffer = ""
                return False
        if self._form.bare and not self._spoken:
            begin = self._buffer.lstrip(SPACE)
            if begin.startswith("{"):
                self._say(self._buffer[: len(self._buffer) - len(begin)])
                self._buffer = begin
                self._block, self._block_calls = [], 0
                self._begin_call()
                return True
        place = self._buffer.find(self._form.begin)
        if place >= 0:
            self._say(self._buffer[:place])
            self._buffer = self._buffer[place + len(self._form.begin) :]
            self._block, self._block_calls = [self._form.begin], 0
            self._state = _State.BLOCK
            return True
        free = len(self._buffer) - held_length(self._buffer, self._form.begin)
        self._say(self._buffer[:free])
        self._buffer = self._buffer[free:]
        return False

    def _step_block(self) -> bool:
        """Between calls: after the marker that begins them, or after a call."""
        rest = self._buffer.lstrip(SPACE if self._form.tags else _BETWEEN_CALLS)
        self._block.append(self._buffer[: len(self._buffer) - len(rest)])
        self._buffer = rest
        end = self._form.end
        if not rest or (end.startswith(rest) and rest != end):
            return False
        if end and rest.startswith(end):
            self._buffer = rest[len(end) :]
            if not self._block_calls:
                self._block.append(end)
        elif self._form.tags or rest.startswith("{"):
            self._begin_call()
            return True
        self._say_block()
        return True

    def _step_call(self) -> bool:
        for place, character in enumerate(self._buffer):
            if not self._scanner.push(character):
                self._buffer = self._buffer[place:]
                if self._scanner.name is None:
                    self._say_block()
                else:
                    self._end_call()
                return True
            if self._scanner.name is None:
                self._block.append(character)
            elif self._block:
                self._certain()
            if self._scanner.done:
                self._buffer = self._buffer[place + 1 :]
                self._end_call()
                return True
        self._buffer = ""
        self._give_arguments()
        return False

    def _new_scanner(self) -> CallScanner | TagScanner:
        if self._form.tags is not None:
            return TagScanner(self._form.tags, self._tools)
        # Where calls need no marker, an object that only has a name may well be an answer.
        return CallScanner(self._tools, arguments_needed=self._form.bare)

    def _begin_call(self) -> None:
        self._scanner = self._new_scanner()
        self._state = _State.CALL

    def _certain(self) -> None:
        """The block has turned out to be a call."""
        self._block = []
        self._space = ""
        self._after_call = True
        self._deltas.append(CallDelta(self._calls, self._scanner.name or ""))
        self._calls += 1
        self._block_calls += 1

    def _give_arguments(self) -> None:
        if self._scanner.name is not None:
            self._deltas.append(ArgumentsDelta(self._calls - 1, self._scanner.take_arguments()))

    def _end_call(self) -> None:
        self._give_arguments()
        tags = self._form.tags
        self._state = _State.TEXT if tags is not None and tags.end == self._form.end else _State.BLOCK

    def _say_block(self) -> None:
        """The rest of a block is no call. Separators after a call are dropped."""
        text = "".join(self._block)
        for marker in self._hidden:
            text = text.replace(marker, "")
        self._say(text.lstrip(_BETWEEN_CALLS) if self._block_calls else text)
        self._block = []
        self._state = _State.TEXT

    def _say(self, text: str) -> None:
        whole = self._space + text
        if self._after_call:
            whole = whole.lstrip(SPACE)
        said = whole.rstrip(SPACE)
        if said:
            self._spoken = True
            self._after_call = False
            self._deltas.append(ContentDelta(said))
        self._space = whole[len(said) :]
