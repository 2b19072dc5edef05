"""Which prefixes of sequences a worker has had lately, and so is likely to have KV of."""

from __future__ import annotations

from collections import OrderedDict

from spool.scheduler.state.digests import DigestedTokens


class KnownPrefixes:
    """Of each sequence, its first 1, 2, 4 and so on pages of `page_size` tokens, by cache scope and digest.

    Those that came last are kept, as many as have `total_pages` pages together, for the worker has KV of no more.
    """

    def __init__(self, page_size: int, total_pages: int) -> None:
        self._page_size = page_size
        self._free = total_pages
        self._pages: OrderedDict[tuple[bytes, int], int] = OrderedDict()
        """Of each prefix, its pages beyond those of the next shorter one."""

    def add(self, scope: bytes, tokens: DigestedTokens) -> None:
        lengths, positions = list[int](), self._page_size
        while positions <= len(tokens):
            lengths.append(positions)
            positions *= 2
        # The shortest last: most others begin with it.
        for positions in reversed(lengths):
            key = scope, tokens.digest(positions)
            if key not in self._pages:
                self._pages[key] = max(1, positions // self._page_size // 2)
                self._free -= self._pages[key]
            self._pages.move_to_end(key)
        while self._free < 0:
            _, pages = self._pages.popitem(last=False)
            self._free += pages

    def longest(self, scope: bytes, tokens: DigestedTokens) -> int:
        """Tokens of the longest prefix that is known; the whole common one may be up to twice as long."""
        # A plain loop: for each newcomer, this is asked of every worker.
        found, positions, length = 0, self._page_size, len(tokens)
        while positions <= length and (scope, tokens.digest(positions)) in self._pages:
            found, positions = positions, 2 * positions
        return found
