"""Which beginnings of sequences a worker has had lately, and so is likely to have KV of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from scheduler.state.digests import DigestedTokens


class KnownPrefixes:
    """Of each sequence, its first 1, 2, 4 and so on pages of `page_size` tokens, by digest.

    Those that came last are kept, as many as have `total_pages` pages together, for the worker has KV of no more.
    """

    def __init__(self, page_size: int, total_pages: int) -> None:
        self._page_size = page_size
        self._free = total_pages
        self._pages: OrderedDict[int, int] = OrderedDict()
        """By digest, the pages beyond those of the next shorter beginning."""

    def add(self, tokens: DigestedTokens) -> None:
        # The shortest last: it is the beginning of most others.
        for pages in reversed(list(self._counts(tokens))):
            digest = tokens.digest(pages * self._page_size)
            if digest not in self._pages:
                self._pages[digest] = max(1, pages // 2)
                self._free -= self._pages[digest]
            self._pages.move_to_end(digest)
        while self._free < 0:
            _, pages = self._pages.popitem(last=False)
            self._free += pages

    def longest(self, tokens: DigestedTokens) -> int:
        """Tokens of the longest beginning that is known; the whole common one may be up to twice as long."""
        # A plain loop: for each newcomer, this is asked of every worker.
        found, positions, length = 0, self._page_size, len(tokens)
        while positions <= length and tokens.digest(positions) in self._pages:
            found, positions = positions, 2 * positions
        return found

    def _counts(self, tokens: DigestedTokens) -> Iterator[int]:
        pages = 1
        while pages * self._page_size <= len(tokens):
            yield pages
            pages *= 2
