"""On which pages of a target a drafting head has KV, and for how much of each. Knows no torch.

The head's KV lies on pages of its own with the numbers of the target's pages, so that what truncates, shares or frees
those holds for the head, too. At position t the head computes a *pair*: the features of t and the token at t + 1. So it
is one token behind its target, until that token is known: meanwhile the page keeps the features of its last position.
"""

from __future__ import annotations

from collections.abc import Sequence


class HeadContext:
    """A page may hold less than the target's: it came from another worker, or the features between were lost. The head
    then attends from the next page on, with which a new context begins."""

    def __init__(self, pages: int, page_size: int) -> None:
        self._size = page_size
        self._filled = [0] * pages
        """Positions from the start of the page on that have the head's KV."""
        self._kept = [0] * pages
        """Of the position before this one the features are kept; 0: of none."""

    def reset(self, page: int) -> None:
        """Nothing of the page is of use to the head any more."""
        self._filled[page] = self._kept[page] = 0

    def feed(self, pages: Sequence[int], start: int, end: int) -> int:
        """The target has computed the positions from `start` to `end` anew. Gives the first position from which on the
        head can compute pairs: `start` - 1 where the features of that position are kept and its pair is missing,
        `end` or more where it can compute none."""
        size = self._size
        first, offset = divmod(start, size)
        for place in range(first, -(-end // size)):
            page, before = pages[place], offset if place == first else 0
            self._filled[page] = min(self._filled[page], before)
            if self._kept[page] > before:
                self._kept[page] = 0
        if start == 0:
            return 0
        place, last = divmod(start - 1, size)
        page = pages[place]
        if self._filled[page] > last:
            return start
        if self._filled[page] == last and self._kept[page] == last + 1:
            return start - 1
        return -(-start // size) * size

    def fill(self, pages: Sequence[int], start: int, end: int) -> None:
        """The head has KV of the pairs from `start` to `end`."""
        for place in range(start // self._size, -(-end // self._size)):
            self._filled[pages[place]] = min(self._size, end - place * self._size)

    def keep(self, pages: Sequence[int], position: int) -> int:
        """The page that keeps the features of the position, as its last ones."""
        place, offset = divmod(position, self._size)
        self._kept[pages[place]] = offset + 1
        return pages[place]

    def is_next(self, pages: Sequence[int], position: int) -> bool:
        """Whether the pair of this position is the next one that the head can compute, from features that are kept."""
        place, offset = divmod(position, self._size)
        page = pages[place]
        return self._filled[page] == offset and self._kept[page] == offset + 1

    def first_page(self, pages: Sequence[int], position: int) -> int:
        """The place among `pages` of the first one that the head attends to at a position."""
        place = position // self._size
        while place and self._filled[pages[place - 1]] == self._size:
            place -= 1
        return place
