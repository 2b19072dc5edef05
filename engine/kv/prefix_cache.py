"""Which full pages hold the KV of which tokens, so that sequences that begin alike share them. Knows no torch."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from spool.engine.kv.pages import PageKey, PagePool, PageTable

_KEY_BYTES = 32


def page_key(before: PageKey, tokens: Sequence[int]) -> PageKey:
    """The key of the page that holds `tokens` and follows the page with the key `before` (of the first: the scope).

    Prompts come from strangers, and a key that two prompts have in common would give one the other's KV: hence a
    cryptographic digest of all the tokens, and not that of scheduler/state/digests.py.
    """
    return hashlib.blake2b(before + array("I", tokens).tobytes(), digest_size=_KEY_BYTES).digest()


class PrefixCache:
    """Finds and registers pages of a pool by tokens.

    Its callers keep, for each sequence, its cache scope (empty or 32 bytes; pages are shared within one alone) and the
    `keys` of its first pages, so that nothing is computed twice: one list, of the scope at first, to be cut to
    `length // page_size + 1` entries where the sequence is truncated.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool

    def share(self, table: PageTable, keys: list[PageKey], tokens: Sequence[int], limit: int) -> int:
        """Appends known pages of `tokens` to a table that holds the first of them and ends at a border of the pool, no
        further than position `limit`; returns the number of positions taken over."""
        size, before = self._pool.page_size, table.length
        most = limit // self._pool.border * self._pool.border
        if before % self._pool.border or most <= before:
            return 0

        def key(pages: int) -> PageKey:
            self._complete(keys, tokens, pages)
            return keys[pages]

        self._pool.share(table, key, most // size)
        self._complete(keys, tokens, table.length // size)
        del keys[table.length // size + 1 :]
        return table.length - before

    def register(self, table: PageTable, keys: list[PageKey], tokens: Sequence[int], length: int) -> None:
        """Lets others find the pages that the first `length` tokens fill. `tokens` are those whose KV the table holds;
        those before `length` are never to be replaced by others."""
        first, full = len(keys) - 1, length // self._pool.page_size
        if first < full:
            self._complete(keys, tokens, full)
            self._pool.publish(table, keys, first)

    def forget(self, table: PageTable) -> None:
        """Nobody is to find the pages of a table whose KV is not trusted."""
        for page in table.pages:
            self._pool.forget(page)

    def _complete(self, keys: list[PageKey], tokens: Sequence[int], pages: int) -> None:
        """Appends keys until there are `pages` of them."""
        size = self._pool.page_size
        while len(keys) <= pages:
            start = (len(keys) - 1) * size
            keys.append(page_key(keys[-1], tokens[start : start + size]))
