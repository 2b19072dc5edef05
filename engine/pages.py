"""The page pool: which sequence's keys and values lie on which pages. Knows no torch and no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field


class OutOfPagesError(Exception):
    """The pool has fewer free pages than an append needs; nothing was changed."""


@dataclass(slots=True, eq=False)
class PageTable:
    """One sequence's pages in order, and the number of positions on them that hold valid KV (`length`)."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class PagePool:
    """Pages of `page_size` positions with reference counts: full pages may be shared, a last, partial page never is."""

    def __init__(self, total_pages: int, page_size: int) -> None:
        if total_pages < 1 or page_size < 1:
            raise ValueError(f"total_pages is {total_pages}, page_size is {page_size}: both must be at least 1")
        self.total_pages = total_pages
        self.page_size = page_size
        self._free = list(range(total_pages - 1, -1, -1))
        self._references = [0] * total_pages

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def can_append(self, table: PageTable, positions: int) -> bool:
        return self.pages_for(table.length + positions) - len(table.pages) <= len(self._free)

    def append(self, table: PageTable, positions: int) -> None:
        """Makes room for `positions` more and moves `length` past them. Raises OutOfPagesError."""
        needed = self.pages_for(table.length + positions) - len(table.pages)
        if needed > len(self._free):
            raise OutOfPagesError(f"{needed} more pages needed, {len(self._free)} of {self.total_pages} are free")
        for _ in range(needed):
            page = self._free.pop()
            self._references[page] = 1
            table.pages.append(page)
        table.length += positions

    def truncate(self, table: PageTable, length: int) -> None:
        """Drops the positions from `length` on, and the pages that hold none any more.

        Raises ValueError for a length inside a page that another table shares: an append would write to that page.
        """
        if not 0 <= length <= table.length:
            raise ValueError(f"length is {length}, must be between 0 and the table's {table.length}")
        keep = self.pages_for(length)
        if length % self.page_size and self._references[table.pages[keep - 1]] > 1:
            raise ValueError(f"length is {length}, must not lie inside a page that is shared")
        for page in reversed(table.pages[keep:]):
            self._drop(page)
        del table.pages[keep:]
        table.length = length

    def fork(self, table: PageTable, length: int) -> PageTable:
        """A table that shares the pages of the first `length` positions, which must be a whole number of pages."""
        if length % self.page_size or not 0 <= length <= table.length:
            raise ValueError(
                f"length is {length}, must be a multiple of the page size {self.page_size} and at most {table.length}"
            )
        shared = table.pages[: length // self.page_size]
        for page in shared:
            self._references[page] += 1
        return PageTable(list(shared), length)

    def free(self, table: PageTable) -> None:
        self.truncate(table, 0)

    def check_conservation(self, tables: list[PageTable]) -> None:
        """Raises RuntimeError unless every page is free once, or referred to as often as `tables` (all of them) say."""
        expected = [0] * self.total_pages
        for table in tables:
            if len(table.pages) < self.pages_for(table.length):
                raise RuntimeError(f"a table of {table.length} positions has only {len(table.pages)} pages")
            for page in table.pages:
                expected[page] += 1
        wrong = [page for page in range(self.total_pages) if expected[page] != self._references[page]]
        free = set(self._free)
        if (
            wrong
            or len(free) != len(self._free)
            or any((expected[p] == 0) != (p in free) for p in range(self.total_pages))
        ):
            raise RuntimeError(f"page accounting is broken; reference counts differ on pages {wrong[:10]}")

    def _drop(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)
