"""Reads the answer of a chat: reasoning, content and calls of functions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from spool.services.gateway.answers.call_parser import ToolCallParser
from spool.services.gateway.answers.deltas import AnswerDelta, ArgumentsDelta, CallDelta, ContentDelta, joined
from spool.services.gateway.answers.formats import CallFormat
from spool.services.gateway.answers.reasoning import THINK, THINK_END, Reasoning, ReasoningSplitter
from spool.services.gateway.answers.tools import Tool

_ID_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the model writes its answers to one request. Without `calls` and reasoning, everything is content.

    `tools` are the functions that an answer may call; unless `several`, it has at most one call. `either`: it is calls
    or content, not both. Markers in `hidden` are dropped where they do not begin a call.
    """

    calls: CallFormat | None = None
    tools: tuple[Tool, ...] = ()
    several: bool = True
    reasoning: Reasoning = Reasoning.NONE
    hidden: frozenset[str] = frozenset()
    either: bool = False

    @property
    def markers(self) -> frozenset[str]:
        """The markers that decoded text must show, even if they are special tokens."""
        found = frozenset[str]() if self.calls is None else self.calls.markers
        return found if self.reasoning is Reasoning.NONE else found | {THINK, THINK_END}

    def call_id(self, request_id: str, choice: int, call: int) -> str:
        """Depends on its arguments alone, so a resumed stream repeats it."""
        form = self.calls or CallFormat(begin="")
        digest = hashlib.sha256(f"{request_id} {choice} {call}".encode()).digest()
        letters = "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in digest[: form.call_id_letters])
        return form.call_id_prefix + letters


class AnswerReader:
    """Reads one choice."""

    def __init__(self, form: AnswerForm) -> None:
        self.called = False
        """Whether a call has begun."""
        self._several = form.several
        self._reasoning = ReasoningSplitter(form.reasoning)
        self._calls = None
        if form.calls is not None:
            self._calls = ToolCallParser(form.calls, form.tools, form.hidden, form.either)

    def push(self, piece: str, last: bool) -> list[AnswerDelta]:
        """What has become certain; with the `last` piece, all that is left."""
        deltas = self._reasoning.push(piece)
        if last:
            deltas += self._reasoning.finish()
        if self._calls is not None:
            deltas = self._parsed(self._calls, deltas)
            if last:
                deltas += self._calls.finish()
            deltas = [delta for delta in deltas if self._wanted(delta)]
        self.called = self.called or any(isinstance(delta, CallDelta) for delta in deltas)
        return joined(deltas)

    @property
    def cut(self) -> bool:
        """Whether the answer has ended within a call."""
        return self._calls is not None and self._calls.cut

    @staticmethod
    def _parsed(parser: ToolCallParser, deltas: list[AnswerDelta]) -> list[AnswerDelta]:
        parsed: list[AnswerDelta] = []
        for delta in deltas:
            parsed += parser.push(delta.text) if isinstance(delta, ContentDelta) else [delta]
        return parsed

    def _wanted(self, delta: AnswerDelta) -> bool:
        return self._several or not isinstance(delta, CallDelta | ArgumentsDelta) or delta.index == 0
