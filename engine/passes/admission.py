"""What target and draft steps share: room on the pages, rollback, and cutting a step into passes. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from spool.engine.kv.pages import OutOfPagesError, PagePool, PageTable
from spool.engine.steps import RowOutcome


@contextmanager
def rolled_back_on_error(pool: PagePool, tables: Sequence[PageTable]) -> Iterator[list[int]]:
    """Gives the tables' lengths; should the body raise, truncates each table to its length from before."""
    starts = [table.length for table in tables]
    try:
        yield starts
    except BaseException:
        for table, start in zip(tables, starts, strict=True):
            pool.truncate(table, min(start, table.length))
        raise


def make_room(pool: PagePool, needs: Sequence[tuple[PageTable, int]], outcomes: Sequence[RowOutcome]) -> list[int]:
    """Appends the positions each table needs; indices of those that got room. The others' outcomes say why not."""
    admitted = []
    for index, (table, positions) in enumerate(needs):
        try:
            pool.append(table, positions)
        except OutOfPagesError as error:
            outcomes[index].error = str(error)
            outcomes[index].out_of_pages = True
        else:
            admitted.append(index)
    return admitted


def split_by_rows(
    indices: Sequence[int], sizes: Sequence[int], logits: Sequence[int], limit: int, max_logits: int
) -> Iterator[list[int]]:
    """`indices` in order, cut so that in each part the sizes sum to at most `limit` tokens, and the `logits` that are
    wanted to at most `max_logits` rows, unless a single one wants more.

    Raises ValueError where a single size is larger.
    """
    part: list[int] = []
    filled = wanted = 0
    for index, size, more in zip(indices, sizes, logits, strict=True):
        if size > limit:
            raise ValueError(f"a row feeds {size} tokens, a pass takes at most {limit}")
        if part and (filled + size > limit or wanted + more > max_logits):
            yield part
            part, filled, wanted = [], 0, 0
        part.append(index)
        filled += size
        wanted += more
    if part:
        yield part
