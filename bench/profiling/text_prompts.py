"""Prompts out of texts: cut to any length, or whole."""

from __future__ import annotations

from collections.abc import Sequence

_GOLDEN = 0.6180339887498949


class TextPrompts:
    """Of the token ids of some texts, which no two of its prompts begin with alike as long as there are enough."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = texts
        self._tokens = [token for text in texts for token in text]
        self._cuts = 0

    def cut(self, length: int) -> tuple[int, ...]:
        """So many tokens of all texts one after the other, and from the beginning again after the last. Where each cut
        begins is spread evenly."""
        self._cuts += 1
        begin = int(self._cuts * _GOLDEN % 1 * len(self._tokens))
        return tuple(self._tokens[(begin + place) % len(self._tokens)] for place in range(length))

    def whole(self, count: int, longest: int) -> list[tuple[int, ...]]:
        """So many texts, evenly spaced and from the first again where there are fewer; of each the first `longest`
        tokens."""
        step = max(1, len(self._texts) // count)
        return [tuple(self._texts[place * step % len(self._texts)][:longest]) for place in range(count)]
