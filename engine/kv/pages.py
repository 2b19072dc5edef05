"""The page pool: which sequence's keys and values lie on which pages. Knows no torch and no tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

PageKey = bytes
"""Names what a full page holds: two pages with equal keys hold the KV of equal tokens after equal tokens."""


class OutOfPagesError(Exception):
    """The pool has fewer free pages than an append needs; nothing was changed."""


@dataclass(slots=True, eq=False)
class PageTable:
    """One sequence's pages in order, and the number of positions on them that hold valid KV (`length`)."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class PagePool:
    """Pages of `page_size` positions with reference counts: full pages may be shared, a last, partial page never is.

    A full page can be given a key, by which others find and share it. It stays known after its last table has dropped
    it, until it is handed out again: pages without a key go first, since they cannot be found, then those longest free.
    """

    def __init__(self, total_pages: int, page_size: int) -> None:
        if total_pages < 1 or page_size < 1:
            raise ValueError(f"total_pages is {total_pages}, page_size is {page_size}: both must be at least 1")
        self.total_pages = total_pages
        self.page_size = page_size
        self._blank = list(range(total_pages - 1, -1, -1))
        self._known_free: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * total_pages
        self._keys: list[PageKey | None] = [None] * total_pages
        self._by_key: dict[PageKey, int] = {}

    @property
    def free_pages(self) -> int:
        return len(self._blank) + len(self._known_free)

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def can_append(self, table: PageTable, positions: int) -> bool:
        return self.pages_for(table.length + positions) - len(table.pages) <= self.free_pages

    def append(self, table: PageTable, positions: int) -> None:
        """Makes room for `positions` more and moves `length` past them. Raises OutOfPagesError."""
        needed = self.pages_for(table.length + positions) - len(table.pages)
        if needed > self.free_pages:
            raise OutOfPagesError(f"{needed} more pages needed, {self.free_pages} of {self.total_pages} are free")
        for _ in range(needed):
            page = self._hand_out()
            self._references[page] = 1
            table.pages.append(page)
        table.length += positions

    def fork(self, table: PageTable, length: int) -> tuple[PageTable, tuple[int, int] | None]:
        """A new table with the first `length` positions of `table`. Full pages are shared. In place of a page of which
        it takes a part, it has one of its own: the pair says from which page to which one the KV is to be copied.

        Raises OutOfPagesError, and ValueError for a length beyond the table's.
        """
        if not 0 <= length <= table.length:
            raise ValueError(f"length is {length}, must be between 0 and the table's {table.length}")
        whole, rest = divmod(length, self.page_size)
        if rest and not self.free_pages:
            raise OutOfPagesError(f"1 more page needed, 0 of {self.total_pages} are free")
        fork = PageTable(table.pages[:whole], length - rest)
        for page in fork.pages:
            self._references[page] += 1
        if not rest:
            return fork, None
        self.append(fork, rest)
        return fork, (table.pages[whole], fork.pages[whole])

    def truncate(self, table: PageTable, length: int) -> None:
        """Drops the positions from `length` on, and the pages that hold none any more.

        A page cut within loses its key, for an append would write to it. Raises ValueError where another table shares
        that page; `writable_length` says how far one must go back instead.
        """
        if not 0 <= length <= table.length:
            raise ValueError(f"length is {length}, must be between 0 and the table's {table.length}")
        if self.writable_length(table, length) != length:
            raise ValueError(f"length is {length}, must not lie inside a page that is shared")
        keep = self.pages_for(length)
        if length % self.page_size:
            self.forget(table.pages[keep - 1])
        # The last pages are handed out first: the front of a prefix serves more sequences than its end.
        for page in reversed(table.pages[keep:]):
            self._drop(page)
        del table.pages[keep:]
        table.length = length

    def writable_length(self, table: PageTable, length: int) -> int:
        """`length`, or the border before it where it lies inside a page that another table shares."""
        whole, rest = divmod(length, self.page_size)
        return length - rest if rest and self._references[table.pages[whole]] > 1 else length

    def free(self, table: PageTable) -> None:
        self.truncate(table, 0)

    # Pages by their keys.

    def remember(self, page: int, key: PageKey) -> None:
        """Gives a full page of a table its key. No effect where the page has one, or another page is known by it."""
        if self._keys[page] is None and key not in self._by_key:
            self._keys[page] = key
            self._by_key[key] = page

    def forget(self, page: int) -> None:
        """Takes a page's key away: tables that share the page keep it, but it is not found any more."""
        key = self._keys[page]
        if key is None:
            return
        self._keys[page] = None
        del self._by_key[key]
        if page in self._known_free:
            del self._known_free[page]
            self._blank.append(page)

    def share(self, table: PageTable, keys: Iterable[PageKey]) -> int:
        """Appends the pages known by `keys`, up to the first that is not known; returns their number.

        Raises ValueError for a table that ends within a page.
        """
        if table.length % self.page_size:
            raise ValueError(f"length is {table.length}, must be a multiple of the page size {self.page_size}")
        before = len(table.pages)
        for key in keys:
            page = self._by_key.get(key)
            if page is None:
                break
            self._known_free.pop(page, None)
            self._references[page] += 1
            table.pages.append(page)
            table.length += self.page_size
        return len(table.pages) - before

    def check_conservation(self, tables: list[PageTable]) -> None:
        """Raises RuntimeError unless every page is free once, or referred to as often as `tables` (all of them) say,
        and every key leads to one page, which no table may write to."""
        expected = [0] * self.total_pages
        for table in tables:
            if len(table.pages) < self.pages_for(table.length):
                raise RuntimeError(f"a table of {table.length} positions has only {len(table.pages)} pages")
            for place, page in enumerate(table.pages):
                expected[page] += 1
                if self._keys[page] is not None and (place + 1) * self.page_size > table.length:
                    raise RuntimeError(f"page {page} has a key and is not full in a table of {table.length} positions")
        wrong = [page for page in range(self.total_pages) if expected[page] != self._references[page]]
        free = {*self._blank, *self._known_free}
        if (
            wrong
            or len(free) != self.free_pages
            or any((expected[p] == 0) != (p in free) for p in range(self.total_pages))
        ):
            raise RuntimeError(f"page accounting is broken; reference counts differ on pages {wrong[:10]}")
        known = {key: page for page, key in enumerate(self._keys) if key is not None}
        if known != self._by_key or len(known) != sum(key is not None for key in self._keys):
            raise RuntimeError("keys and pages do not agree")
        if any(self._keys[page] is not None for page in self._blank) or not all(
            self._keys[page] for page in self._known_free
        ):
            raise RuntimeError("a free page is filed wrongly")

    def _hand_out(self) -> int:
        if self._blank:
            return self._blank.pop()
        page, _ = self._known_free.popitem(last=False)
        self.forget(page)
        return page

    def _drop(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            if self._keys[page] is None:
                self._blank.append(page)
            else:
                self._known_free[page] = None
