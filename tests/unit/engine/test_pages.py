from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.pages import OutOfPagesError, PagePool, PageTable

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["append", "truncate", "open", "free"]), st.integers(0, 5), st.integers(0, 40)),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(operations=OPERATIONS, total=st.integers(1, 12), page_size=st.integers(1, 5))
def test_pages_are_conserved(operations: list[tuple[str, int, int]], total: int, page_size: int) -> None:
    """Against a model that knows only lengths: what fits, and what each table holds."""
    pool = PagePool(total, page_size)
    tables: list[PageTable] = [PageTable()]
    for name, which, amount in operations:
        table = tables[which % len(tables)]
        before = (list(table.pages), table.length)
        if name == "append":
            fits = pool.can_append(table, amount)
            try:
                pool.append(table, amount)
            except OutOfPagesError:
                assert not fits
                assert (table.pages, table.length) == before
            else:
                assert fits
                assert table.length == before[1] + amount
        elif name == "truncate":
            length = min(amount, table.length)
            pool.truncate(table, length)
            assert table.length == length
            assert len(table.pages) == -(-length // page_size)
        elif name == "open":
            tables.append(PageTable())
        else:
            pool.free(table)
            assert table.pages == []
        pool.check_conservation(tables)
        held = {page for other in tables for page in other.pages}
        assert pool.free_pages == total - len(held)
        assert len(held) == sum(len(other.pages) for other in tables)
    for table in tables:
        pool.free(table)
    assert pool.free_pages == total


def test_conservation_check_sees_a_leak() -> None:
    pool = PagePool(4, 2)
    table = PageTable()
    pool.append(table, 3)
    with pytest.raises(RuntimeError, match="accounting"):
        pool.check_conservation([])


@pytest.mark.parametrize(("total", "size"), [(0, 4), (4, 0)])
def test_empty_pools_are_refused(total: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(total, size)
