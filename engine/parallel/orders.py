"""The orders of rank 0 to the other ranks, as numbers.

Every order is a list that begins with its kind. Ranks hold the same pages, and passes are functions of their sequences
alone, so an order for a pass holds tokens, lengths and pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

from engine.attention.backends import AttentionForm
from engine.kv.pages import PageRun, PageTable
from engine.passes.layout import BatchedSequence

_NONE = -1


class Order(IntEnum):
    NEW_RUNNER = 0
    """What a `RunnerPlan` says; passes and pages are those of the newest runner."""
    PASS = 1
    SCRUB = 2
    """The group of layers, the offset in the first page, and pages."""
    READ_PAGE = 3
    WRITE_PAGE = 4


@dataclass(frozen=True, slots=True)
class RunnerPlan:
    """Of a pool and the runner over it, as in engine/models/loaded_model.py; `windows` as in engine/kv/groups.py."""

    pages: int
    page_size: int
    windows: tuple[int | None, ...]
    form: AttentionForm | None
    row_counts: tuple[int, ...]


def plan_to_numbers(plan: RunnerPlan) -> list[int]:
    windows = [window or 0 for window in plan.windows]
    numbers = [plan.pages, plan.page_size, len(windows), *windows, len(plan.row_counts), *plan.row_counts]
    form = plan.form
    if form is not None:
        limit = _NONE if form.max_query_rows is None else form.max_query_rows
        numbers += [form.query_multiple, limit, *form.kv_lengths]
    return numbers


def plan_from_numbers(numbers: Sequence[int]) -> RunnerPlan:
    pages, page_size, count, *rest = numbers
    windows, (count, *rest) = tuple(window or None for window in rest[:count]), rest[count:]
    row_counts, rest = tuple(rest[:count]), rest[count:]
    form = None
    if rest:
        multiple, limit, *lengths = rest
        form = AttentionForm(tuple(lengths), multiple, None if limit == _NONE else limit)
    return RunnerPlan(pages, page_size, windows, form, row_counts)


def pass_to_numbers(sequences: Sequence[BatchedSequence]) -> list[int]:
    numbers: list[int] = []
    for sequence in sequences:
        table, scored = sequence.table, sequence.scored
        numbers += [table.length, sequence.logits, scored.start, scored.stop, len(sequence.tokens), len(table.runs)]
        numbers += sequence.tokens
        for run in table.runs:
            numbers += [run.freed, len(run.pages), *run.pages]
    return numbers


def pass_from_numbers(numbers: Sequence[int]) -> Iterator[BatchedSequence]:
    left = iter(numbers)
    while head := list(islice(left, 6)):
        length, logits, first, stop, tokens, runs = head
        fed, table = list(islice(left, tokens)), PageTable([], length)
        for freed, pages in (islice(left, 2) for _ in range(runs)):
            table.runs.append(PageRun(list(islice(left, pages)), freed))
        yield BatchedSequence(table, fed, logits, range(first, stop))
