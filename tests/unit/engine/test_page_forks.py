"""Tables that share their first pages with another one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.paged_kv import PagedKv
from engine.kv.pages import OutOfPagesError, PagePool, PageTable

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["append", "truncate", "fork", "free", "remember"]), st.integers(0, 5), st.integers(0, 30)
    ),
    max_size=60,
)


class Written:
    """What stands at each position of the pool, as one who appends to tables writes it."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pages = [[-1] * pool.page_size for _ in range(pool.total_pages)]
        self.next = 0

    def write(self, table: PageTable, first: int) -> list[int]:
        new = []
        for position in range(first, table.length):
            page, place = divmod(position, self.pool.page_size)
            self.pages[table.pages[page]][place] = self.next
            new.append(self.next)
            self.next += 1
        return new

    def read(self, table: PageTable) -> list[int]:
        return [number for page in table.pages for number in self.pages[page]][: table.length]


@settings(max_examples=200, deadline=None)
@given(operations=OPERATIONS, total=st.integers(1, 12), page_size=st.integers(1, 5))
def test_forks_keep_what_they_hold(operations: list[tuple[str, int, int]], total: int, page_size: int) -> None:
    """Against lists of numbers, one for each table: no write to a table is seen by another one."""
    pool = PagePool(total, page_size)
    written = Written(pool)
    tables: list[PageTable] = [PageTable()]
    contents: list[list[int]] = [[]]
    for name, which, amount in operations:
        which %= len(tables)
        table, content = tables[which], contents[which]
        before = pool.free_pages
        if name == "append":
            # A table that ends on a border never needs another's page; within a page, the page is its own.
            try:
                pool.append(table, amount)
            except OutOfPagesError:
                assert pool.free_pages == before
            else:
                content += written.write(table, len(content))
        elif name == "truncate":
            length = pool.writable_length(table, min(amount, table.length))
            pool.truncate(table, length)
            del content[length:]
        elif name == "fork":
            length = min(amount, table.length)
            try:
                fork, copy = pool.fork(table, length)
            except OutOfPagesError:
                assert length % page_size
                assert before == pool.free_pages == 0
            else:
                assert (copy is None) == (length % page_size == 0)
                assert before - pool.free_pages == (copy is not None)
                if copy is not None:
                    source, destination = copy
                    assert (source, destination) == (table.pages[length // page_size], fork.pages[-1])
                    written.pages[destination] = list(written.pages[source])
                tables.append(fork)
                contents.append(content[:length])
        elif name == "remember":
            full = table.length // page_size
            if full:
                pool.remember(table.pages[amount % full], bytes([amount]))
        else:
            pool.free(table)
            content.clear()
        pool.check_conservation(tables)
        assert [written.read(one) for one in tables] == contents
    for table in tables:
        pool.free(table)
    assert pool.free_pages == total


@pytest.mark.parametrize("length", [-1, 6])
def test_more_than_there_is_cannot_be_forked(length: int) -> None:
    pool, table = PagePool(4, 2), PageTable()
    pool.append(table, 5)
    with pytest.raises(ValueError, match=f"length is {length}, must be between 0 and the table's 5"):
        pool.fork(table, length)
    pool.check_conservation([table])


def test_a_fork_without_a_page_changes_nothing() -> None:
    pool, table = PagePool(3, 2), PageTable()
    pool.append(table, 5)
    with pytest.raises(OutOfPagesError, match="1 more page needed, 0 of 3 are free"):
        pool.fork(table, 3)
    pool.check_conservation([table])
    fork, copy = pool.fork(table, 4)
    assert (fork.pages, fork.length, copy) == (table.pages[:2], 4, None)
    pool.check_conservation([table, fork])


@pytest.mark.parametrize("copies", [[], [(0, 3)], [(1, 4), (1, 2), (0, 3)]])
def test_pages_are_copied_whole(copies: list[tuple[int, int]]) -> None:
    kv = PagedKv(3, 5, 4, 2, 8, torch.bfloat16, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for layer in kv.layers:
        layer.pool.copy_(torch.randn(layer.pool.shape, generator=generator))
    expected = [kv.read_page(page) for page in range(6)]
    for source, destination in copies:
        expected[destination] = expected[source]
    kv.copy_pages(copies)
    assert all(torch.equal(kv.read_page(page), expected[page]) for page in range(6))
