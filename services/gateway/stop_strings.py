"""Cuts a growing text where a stop string is complete."""

from __future__ import annotations

from collections.abc import Sequence

from spool.services.gateway.answers.markers import held_length


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
        self._held = ""
        self.hit: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str) -> str:
        """The text that has become certain. Once a stop string is complete, `hit` names it and no more text comes."""
        if self.hit is not None:
            return ""
        text = self._held + piece
        for end in range(len(self._held) + 1, len(text) + 1):
            self.hit = max((stop for stop in self._stops if text.endswith(stop, 0, end)), key=len, default=None)
            if self.hit is not None:
                self._held = ""
                return text[: end - (0 if self._include_stop else len(self.hit))]
        free = len(text) - max((held_length(text, stop) for stop in self._stops), default=0)
        self._held = text[free:]
        return text[:free]

    def finish(self) -> str:
        """The text that was held back, at the end of a text without a complete stop string."""
        held, self._held = self._held, ""
        return held
