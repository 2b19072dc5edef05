"""Splits an answer into reasoning, between `<think>` and `</think>`, and content."""

from __future__ import annotations

from enum import Enum, auto

from services.gateway.answers.deltas import AnswerDelta, ContentDelta, ReasoningDelta
from services.gateway.answers.markers import SPACE, held_length

THINK, THINK_END = "<think>", "</think>"


class Reasoning(Enum):
    """How answers to a prompt begin: never with reasoning, possibly with it, or within it, as the prompt opens it."""

    NONE = auto()
    POSSIBLE = auto()
    OPEN = auto()


def reasoning_after(prompt: str) -> Reasoning:
    """For a model that reasons. Some templates write a whole empty reasoning where the request turns it off."""
    prompt = prompt.rstrip()
    if prompt.endswith(THINK_END):
        return Reasoning.NONE
    return Reasoning.OPEN if prompt.endswith(THINK) else Reasoning.POSSIBLE


class _State(Enum):
    BEGIN = auto()
    REASONING = auto()
    REASONING_ENDED = auto()
    CONTENT = auto()


class ReasoningSplitter:
    """Only the beginning of an answer can be reasoning. White space at both ends of it and after it is dropped.

    If reasoning does not end, the answer has no content. The result does not depend on the pieces in which the text
    comes.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        states = {Reasoning.NONE: _State.CONTENT, Reasoning.POSSIBLE: _State.BEGIN, Reasoning.OPEN: _State.REASONING}
        self._state = states[reasoning]
        self._held = ""
        self._begun = False

    def push(self, piece: str) -> list[AnswerDelta]:
        """What has become certain."""
        deltas: list[AnswerDelta] = []
        text, self._held = self._held + piece, ""
        if self._state is _State.BEGIN:
            begin = text.lstrip(SPACE)
            if THINK.startswith(begin) and begin != THINK:
                self._held = text
                return deltas
            reasons = begin.startswith(THINK)
            text = begin[len(THINK) :] if reasons else text
            self._state = _State.REASONING if reasons else _State.CONTENT
        if self._state is _State.REASONING:
            text = text if self._begun else text.lstrip(SPACE)
            end = text.find(THINK_END)
            if end < 0:
                # White space is held, as the end may follow.
                reasoning = text[: len(text) - held_length(text, THINK_END)].rstrip(SPACE)
                self._held = text[len(reasoning) :]
            else:
                reasoning = text[:end].rstrip(SPACE)
            if reasoning:
                self._begun = True
                deltas.append(ReasoningDelta(reasoning))
            if end < 0:
                return deltas
            text = text[end + len(THINK_END) :]
            self._state = _State.REASONING_ENDED
        if self._state is _State.REASONING_ENDED:
            text = text.lstrip(SPACE)
            if text:
                self._state = _State.CONTENT
        if text:
            deltas.append(ContentDelta(text))
        return deltas

    def finish(self) -> list[AnswerDelta]:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        if self._state is _State.REASONING:
            held = held.rstrip(SPACE)
            return [ReasoningDelta(held)] if held else []
        return [ContentDelta(held)] if held else []
