"""How many pages a sequence takes on a worker, some of whose layers keep no more KV than their windows see."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Of each group of layers, the positions that a page holds (`spans`) and that a position sees (`windows`; 0: all).
    Between two steps a worker frees pages that no window sees any more; a step adds at most `ahead` positions."""

    spans: tuple[int, ...]
    windows: tuple[int, ...]
    ahead: int

    def pages_for(self, positions: int) -> int:
        """The most pages that a sequence has until it is that long."""
        pages = 0
        for span, window in zip(self.spans, self.windows, strict=True):
            whole = -(-positions // span)
            # What a window sees, and what comes after it, may begin and end within a page.
            pages += min(whole, -(-(window - 1 + self.ahead) // span) + 1) if window else whole
        return pages

    def longest(self, pages: int, limit: int) -> int:
        """Positions of the longest sequence, of up to `limit`, that takes no more pages."""
        return bisect_right(range(1, limit + 1), pages, key=self.pages_for)
