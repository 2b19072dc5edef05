"""What a growing answer is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Call number `index` of the answer begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """The JSON text of the arguments of call number `index` goes on."""

    index: int
    text: str


AnswerDelta = ContentDelta | ReasoningDelta | CallDelta | ArgumentsDelta


def joined(deltas: Iterable[AnswerDelta]) -> list[AnswerDelta]:
    """The same with neighbours of one kind made one, and without empty texts."""
    result: list[AnswerDelta] = []
    for delta in deltas:
        if not isinstance(delta, CallDelta) and not delta.text:
            continue
        match result[-1] if result else None, delta:
            case ContentDelta(before), ContentDelta(text):
                result[-1] = ContentDelta(before + text)
            case ReasoningDelta(before), ReasoningDelta(text):
                result[-1] = ReasoningDelta(before + text)
            case ArgumentsDelta(index, before), ArgumentsDelta(same, text) if index == same:
                result[-1] = ArgumentsDelta(index, before + text)
            case _:
                result.append(delta)
    return result
