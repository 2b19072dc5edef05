"""Divides an answer into what the model thinks, between `<think>` and `</think>`, and what it says."""

from __future__ import annotations

from enum import Enum, auto

from services.gateway.answers.deltas import AnswerDelta, ContentDelta, ReasoningDelta
from services.gateway.answers.markers import SPACE, held_length

THINK, THINK_END = "<think>", "</think>"


class Reasoning(Enum):
    """How answers to a prompt begin: without a thought, with one or without, or within one that the prompt begins."""

    NONE = auto()
    POSSIBLE = auto()
    OPEN = auto()


class _State(Enum):
    BEGIN = auto()
    THOUGHT = auto()
    THOUGHT_ENDED = auto()
    SPEECH = auto()


class ReasoningSplitter:
    """Only an answer's beginning can be a thought. White space at both ends of the thought and after it is dropped.

    A thought that does not end is all that there is of the answer. The pieces in which the text comes make no
    difference.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        states = {Reasoning.NONE: _State.SPEECH, Reasoning.POSSIBLE: _State.BEGIN, Reasoning.OPEN: _State.THOUGHT}
        self._state = states[reasoning]
        self._held = ""
        self._thought_begun = False

    def push(self, piece: str) -> list[AnswerDelta]:
        """What has become certain."""
        deltas: list[AnswerDelta] = []
        text, self._held = self._held + piece, ""
        if self._state is _State.BEGIN:
            begin = text.lstrip(SPACE)
            if THINK.startswith(begin) and begin != THINK:
                self._held = text
                return deltas
            thinks = begin.startswith(THINK)
            text = begin[len(THINK) :] if thinks else text
            self._state = _State.THOUGHT if thinks else _State.SPEECH
        if self._state is _State.THOUGHT:
            text = text if self._thought_begun else text.lstrip(SPACE)
            end = text.find(THINK_END)
            if end < 0:
                # White space is held, as the end may follow.
                thought = text[: len(text) - held_length(text, THINK_END)].rstrip(SPACE)
                self._held = text[len(thought) :]
            else:
                thought = text[:end].rstrip(SPACE)
            if thought:
                self._thought_begun = True
                deltas.append(ReasoningDelta(thought))
            if end < 0:
                return deltas
            text = text[end + len(THINK_END) :]
            self._state = _State.THOUGHT_ENDED
        if self._state is _State.THOUGHT_ENDED:
            text = text.lstrip(SPACE)
            if text:
                self._state = _State.SPEECH
        if text:
            deltas.append(ContentDelta(text))
        return deltas

    def finish(self) -> list[AnswerDelta]:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        if self._state is _State.THOUGHT:
            held = held.rstrip(SPACE)
            return [ReasoningDelta(held)] if held else []
        return [ContentDelta(held)] if held else []
