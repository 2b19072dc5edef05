"""Cuts a growing text where a stop string is complete."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringCutter:
    """Lets text through up to the first stop string.

    The text is cut as if it came character by character: at the stop string that is complete first and, of several
    that are complete at the same character, at the longest. So the result does not depend on the pieces in which the
    text comes. Only text that may still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`stops` must not hold the empty string. With `include_stop` the text ends with the stop string."""
        self._include_stop = include_stop
        self._stops = tuple(stops)
        self._fallbacks = tuple(_fallbacks(stop) for stop in stops)
        # For each stop string, how many of its characters the text ends with.
        self._matched = [0] * len(stops)
        self._held = ""
        self.hit: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str) -> str:
        """The text that has become certain. Once a stop string is complete, `hit` names it and no more text comes."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        for place in range(len(self._held), len(text)):
            self.hit = self._advance(text[place])
            if self.hit is not None:
                self._held = ""
                return text[: place + 1 - (0 if self._include_stop else len(self.hit))]
        free = len(text) - max(self._matched)
        self._held = text[free:]
        return text[:free]

    def finish(self) -> str:
        """The text that was held back, at the end of a text without a complete stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Takes in one character; returns the longest stop string that the character completes."""
        hit: str | None = None
        for index, (stop, fallbacks) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = fallbacks[matched - 1]
            if stop[matched] == character:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop) and (hit is None or matched > len(hit)):
                hit = stop
        return hit


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of the longest shorter prefix at its end (Knuth, Morris and Pratt)."""
    lengths = [0] * len(stop)
    matched = 0
    for place in range(1, len(stop)):
        while matched and stop[matched] != stop[place]:
            matched = lengths[matched - 1]
        if stop[matched] == stop[place]:
            matched += 1
        lengths[place] = matched
    return lengths
