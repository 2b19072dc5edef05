"""The page pool: which sequence's keys and values lie on which pages. Knows no torch and no tensors."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spool.engine.kv.groups import PageGroup
from spool.scheduler.errors import SpoolError

PageKey = bytes
"""Names what a full page holds: two pages with equal keys hold the KV of equal tokens after equal tokens."""


class OutOfPagesError(SpoolError):
    """The pool has fewer free pages than an append needs; nothing was changed."""


@dataclass(slots=True, eq=False)
class PageRun:
    """One sequence's pages for one group of layers, in order, but for the first `freed`, which its window has left."""

    pages: list[int] = field(default_factory=list)
    freed: int = 0

    @property
    def end(self) -> int:
        return self.freed + len(self.pages)


@dataclass(slots=True, eq=False)
class PageTable:
    """One sequence's pages, a run for each group of layers, and the number of positions that hold valid KV."""

    runs: list[PageRun] = field(default_factory=lambda: [PageRun()])
    length: int = 0

    @property
    def pages(self) -> list[int]:
        """Those of all runs, one after the other."""
        return self.runs[0].pages if len(self.runs) == 1 else [page for run in self.runs for page in run.pages]


class PagePool:
    """Pages with reference counts: full pages may be shared, a last, partial page never is.

    A page serves one of the `groups` of layers at a time. A full page can be given a key, by which others find and
    share it. It stays known after its last table has dropped it, until it is handed out again: pages without a key go
    first, since they cannot be found, then those longest free.
    """

    def __init__(
        self, total_pages: int, page_size: int, groups: Sequence[PageGroup] = (PageGroup(),), rewinds: bool = True
    ) -> None:
        """`rewinds`: whether a table can be cut anywhere; else at its pages' borders only."""
        if total_pages < 1 or page_size < 1:
            raise ValueError(f"total_pages is {total_pages}, page_size is {page_size}: both must be at least 1")
        self.total_pages = total_pages
        self.page_size = page_size
        self.groups = tuple(groups)
        self.rewinds = rewinds
        self.border = page_size * math.lcm(*(group.slices for group in groups))
        """At multiples of it, pages of all groups end."""
        self._spans = [page_size * group.slices for group in groups]
        self._windowed = any(group.window is not None for group in groups)
        self._blank = list(range(total_pages - 1, -1, -1))
        self._known_free: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * total_pages
        self._keys: list[PageKey | None] = [None] * total_pages
        self._by_key: dict[PageKey, int] = {}

    @property
    def free_pages(self) -> int:
        return len(self._blank) + len(self._known_free)

    def can_append(self, table: PageTable, positions: int) -> bool:
        return self.missing(table, table.length + positions) <= self.free_pages

    def append(self, table: PageTable, positions: int) -> None:
        """Makes room for `positions` more and moves `length` past them. Raises OutOfPagesError."""
        end = table.length + positions
        if 0 < positions <= -table.length % self.page_size:
            # The last page of every group has room: its end is a multiple of the page size.
            table.length = end
            return
        needed = self.missing(table, end)
        if needed:
            if needed > self.free_pages:
                raise OutOfPagesError(f"{needed} more pages needed, {self.free_pages} of {self.total_pages} are free")
            for span, run in zip(self._spans, self._runs(table), strict=True):
                run.pages += [self._hand_out() for _ in range(run.end, -(-end // span))]
        table.length = end

    def take(self, table: PageTable, length: int) -> None:
        """Makes room in an empty table for `length` positions, but for those that windows have left by then. Raises
        OutOfPagesError."""
        for group, span, run in zip(self.groups, self._spans, self._runs(table), strict=True):
            run.freed = group.left_behind(length) // span
        try:
            self.append(table, length)
        except OutOfPagesError:
            self.free(table)
            raise

    def trim(self, table: PageTable, length: int) -> None:
        """Frees the pages that no position from `length` on sees. The table is never cut below `length` then, unless
        to nothing."""
        if not self._windowed:
            return
        for group, span, run in zip(self.groups, self._spans, table.runs, strict=False):
            if group.window is None:
                continue
            left = group.left_behind(length) // span - run.freed
            if left > 0:
                for page in run.pages[:left]:
                    self._drop(page)
                del run.pages[:left]
                run.freed += left

    def truncate(self, table: PageTable, length: int) -> int:
        """Drops the positions from `length` on, and the pages that hold none any more. Returns the new length.

        That is the border before where `length` lies inside a page that another table shares, and 0 where a window has
        left pages that positions from there on see. A page cut within loses its key, for an append would write to it.
        """
        if not 0 <= length <= table.length:
            raise ValueError(f"length is {length}, must be between 0 and the table's {table.length}")
        if length == table.length:
            return length
        length = self._writable_length(table, length)
        for span, run in zip(self._spans, table.runs, strict=False):
            if not length:
                keep = run.freed = 0
            else:
                keep = -(-length // span) - run.freed
            if length % span:
                self.forget(run.pages[keep - 1])
            # The last pages are handed out first: the front of a prefix serves more sequences than its end.
            for page in reversed(run.pages[keep:]):
                self._drop(page)
            del run.pages[keep:]
        table.length = length
        return length

    def _writable_length(self, table: PageTable, length: int) -> int:
        if not self.rewinds:
            length -= length % self.border
        shared = False
        for group, span, run in zip(self.groups, self._spans, table.runs, strict=False):
            if run.freed and run.freed * span > group.left_behind(length):
                return 0
            if length % span and self._references[run.pages[length // span - run.freed]] > 1:
                shared = True
        return self._writable_length(table, length - length % self.border) if shared else length

    def free(self, table: PageTable) -> None:
        self.truncate(table, 0)

    def fork(self, table: PageTable, length: int) -> PageTable:
        """Another table with the first `length` positions, or those up to the border before, on the same pages; an
        empty one where windows have left what positions from there on see."""
        length -= length % self.border
        runs = [*zip(self.groups, self._spans, self._runs(table), strict=True)]
        if any(run.freed * span > group.left_behind(length) for group, span, run in runs):
            return PageTable()
        shared = [PageRun(run.pages[: length // span - run.freed], run.freed) for _, span, run in runs]
        for page in (page for run in shared for page in run.pages):
            self._references[page] += 1
        return PageTable(shared, length)

    # Pages by their keys.

    def remember(self, page: int, key: PageKey) -> None:
        """Gives a full page of a table its key. No effect where the page has one, or another page is known by it."""
        if self._keys[page] is None and key not in self._by_key:
            self._keys[page] = key
            self._by_key[key] = page

    def publish(self, table: PageTable, keys: Sequence[PageKey], first: int) -> None:
        """Gives a table's pages past the first `first * page_size` positions their keys; `keys[n]` names the first
        `n * page_size` positions."""
        for place, (group, run) in enumerate(zip(self.groups, self._runs(table), strict=True)):
            for page in range(max(first // group.slices, run.freed), (len(keys) - 1) // group.slices):
                self.remember(run.pages[page - run.freed], _key_of(place, keys[(page + 1) * group.slices]))

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

    def share(self, table: PageTable, key: Callable[[int], PageKey], most: int) -> None:
        """Appends known pages, as far as there are all that positions after them see, and at most up to position
        `most * page_size`. `key(n)` names the first `n * page_size` positions; it is asked for ascending ones.

        Raises ValueError for a table that does not end at a `border`.
        """
        if table.length % self.border:
            raise ValueError(f"length is {table.length}, must be a multiple of {self.border}")
        start, step = table.length // self.page_size, self.border // self.page_size
        # Of each group, where the pages begin that are known up to the last one looked at.
        known_from = [run.freed for run in self._runs(table)]
        found: list[list[int]] = [[] for _ in self.groups]
        best = start
        for end in range(start + step, most + 1, step):
            for place, group in enumerate(self.groups):
                for page in range((end - step) // group.slices, end // group.slices):
                    known = self._by_key.get(_key_of(place, key((page + 1) * group.slices)))
                    found[place].append(-1 if known is None else known)
                    if known is None:
                        known_from[place] = page + 1
            if all(
                first * span <= group.left_behind(end * self.page_size)
                for group, span, first in zip(self.groups, self._spans, known_from, strict=True)
            ):
                best = end
            elif start or any(first for group, first in zip(self.groups, known_from, strict=True) if not group.window):
                # Later pages could do where all layers have windows; what that costs is worth it once.
                break
        if best > start:
            self._append_known(table, found, best)

    def _append_known(self, table: PageTable, found: Sequence[Sequence[int]], end: int) -> None:
        """`found`: of each group, pages that follow the table's."""
        table.length = end * self.page_size
        for group, span, run, pages in zip(self.groups, self._spans, table.runs, found, strict=True):
            first = group.left_behind(table.length) // span
            taken = pages[max(0, first - run.end) : end // group.slices - run.end]
            for page in taken:
                self._known_free.pop(page, None)
                self._references[page] += 1
            if first > run.end:
                for page in run.pages:
                    self._drop(page)
                run.pages, run.freed = [], first
            run.pages += taken
        self.trim(table, table.length)

    def check_conservation(self, tables: list[PageTable]) -> None:
        """Raises RuntimeError unless every page is free once, or referred to as often as `tables` (all of them) say,
        and every key leads to one page, which no table may write to."""
        expected = [0] * self.total_pages
        for table in tables:
            if self.missing(table, table.length):
                raise RuntimeError(f"a table of {table.length} positions has only {len(table.pages)} pages")
            for span, run in zip(self._spans, table.runs, strict=False):
                for place, page in enumerate(run.pages, run.freed):
                    expected[page] += 1
                    if self._keys[page] is not None and (place + 1) * span > table.length:
                        raise RuntimeError(
                            f"page {page} has a key and is not full in a table of {table.length} positions"
                        )
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

    def _runs(self, table: PageTable) -> list[PageRun]:
        while len(table.runs) < len(self.groups):
            table.runs.append(PageRun())
        return table.runs

    def missing(self, table: PageTable, length: int) -> int:
        """Pages that the table needs to hold `length` positions, beyond those that it has."""
        missing = 0
        for span, run in zip(self._spans, self._runs(table), strict=True):
            short = -(-length // span) - run.freed - len(run.pages)
            if short > 0:
                missing += short
        return missing

    def _hand_out(self) -> int:
        if self._blank:
            page = self._blank.pop()
        else:
            page, _ = self._known_free.popitem(last=False)
            self.forget(page)
        self._references[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            if self._keys[page] is None:
                self._blank.append(page)
            else:
                self._known_free[page] = None


def _key_of(group: int, key: PageKey) -> PageKey:
    """A page of another group holds the KV of other layers."""
    return key + bytes((group,)) if group else key
