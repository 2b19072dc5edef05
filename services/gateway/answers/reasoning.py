"""Splits an answer into reasoning, between `<think>` and `</think>`, and content."""

from __future__ import annotations

from enum import Enum, auto

from spool.services.gateway.answers.deltas import AnswerDelta, ContentDelta, ReasoningDelta
from spool.services.gateway.answers.markers import SPACE, held_length

THINK, THINK_END = "<think>", "</think>"


class Reasoning(Enum):
    """How answers to a prompt begin: never with reasoning, possibly with it, or within it, as the prompt opens it or
    begins its text too."""

    NONE = auto()
    POSSIBLE = auto()
    OPEN = auto()
    BEGUN = auto()


def reasoning_after(prompt: str, begun: str = "") -> Reasoning:
    """For a model that reasons; `begun` is the part of the answer that the prompt has already. Some templates write a
    whole empty reasoning where the request turns it off."""
    begun = begun.strip(SPACE)
    head = prompt.rstrip().removesuffix(begun).rstrip()
    if THINK_END in begun or head.endswith(THINK_END):
        return Reasoning.NONE
    if head.endswith(THINK):
        return Reasoning.BEGUN if begun else Reasoning.OPEN
    if begun.startswith(THINK):
        return Reasoning.OPEN if begun == THINK else Reasoning.BEGUN
    return Reasoning.NONE if begun else Reasoning.POSSIBLE


class ThoughtFinder:
    """Splits the text of an answer where its reasoning ends. The result does not depend on the pieces in which the text
    comes."""

    def __init__(self, reasoning: Reasoning) -> None:
        self._reasoning = reasoning
        self._held = ""

    def push(self, piece: str) -> tuple[str, str]:
        """What has become certain: text of the reasoning with its marks, and text after it."""
        text, self._held = self._held + piece, ""
        if self._reasoning is Reasoning.POSSIBLE:
            begin = text.lstrip(SPACE)
            if THINK.startswith(begin) and begin != THINK:
                self._held = text
                return "", ""
            self._reasoning = Reasoning.OPEN if begin.startswith(THINK) else Reasoning.NONE
        if self._reasoning is Reasoning.NONE:
            return "", text
        end = text.find(THINK_END)
        if end < 0:
            free = len(text) - held_length(text, THINK_END)
            self._held = text[free:]
            return text[:free], ""
        self._reasoning = Reasoning.NONE
        return text[: end + len(THINK_END)], text[end + len(THINK_END) :]

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return ("", held) if self._reasoning in (Reasoning.NONE, Reasoning.POSSIBLE) else (held, "")


class ReasoningSplitter:
    """Only the beginning of an answer can be reasoning. Its marks and white space at both ends of it and after it are
    dropped, but not white space that follows what the prompt has of it.

    If reasoning does not end, the answer has no content. The result does not depend on the pieces in which the text
    comes.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self._finder = ThoughtFinder(reasoning)
        self._mark = THINK if reasoning is Reasoning.POSSIBLE else ""
        """Comes before the text of the reasoning."""
        self._space = ""
        """At the end of the reasoning up to now."""
        self._begun = reasoning is Reasoning.BEGUN
        self._trims = False
        """Whether white space before content is dropped."""

    def push(self, piece: str) -> list[AnswerDelta]:
        """What has become certain."""
        return self._deltas(*self._finder.push(piece))

    def finish(self) -> list[AnswerDelta]:
        """What was held back, at the end of the answer."""
        return self._deltas(*self._finder.finish())

    def _deltas(self, thought: str, content: str) -> list[AnswerDelta]:
        deltas: list[AnswerDelta] = []
        if thought:
            text = self._space + thought
            if not self._begun:
                text = text.lstrip(SPACE).removeprefix(self._mark).lstrip(SPACE)
                self._mark = ""
            text = text.removesuffix(THINK_END)
            reasoning = text.rstrip(SPACE)
            self._space = text[len(reasoning) :]
            if reasoning:
                self._begun = True
                deltas.append(ReasoningDelta(reasoning))
            self._trims = True
        if self._trims:
            content = content.lstrip(SPACE)
            self._trims = not content
        if content:
            deltas.append(ContentDelta(content))
        return deltas
