"""The batch of one forward pass: the tokens of many sequences, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from spool.engine.attention.backends import Span
from spool.engine.attention.paged_step import PagedStep
from spool.engine.kv.paged_kv import PagedKv
from spool.engine.kv.pages import PageTable

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PagedStep], torch.Tensor]
"""What a pass computes: of tokens, positions and the rows that want logits, int64 on the device, logits
`[logits_rows, vocabulary]`."""


@dataclass(slots=True)
class BatchedSequence:
    """`tokens` to feed at the last `len(tokens)` positions of `table`, where room was made already; logits are wanted
    for the last `logits` of them, and for those before them that `scored` counts."""

    table: PageTable
    tokens: Sequence[int]
    logits: int
    scored: range = range(0)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """`tokens`, their `positions` and, for each group of layers, the `slots` of their K/V, all padded to one row count;
    `logits_rows` are the rows of which logits are wanted: first the last rows of each sequence, then the scored ones of
    each. `spans`, of each group, hold the first `rows` rows, the real ones. `fed` are tokens on the device that take
    the places of the first `tokens`."""

    tokens: list[int]
    positions: list[int]
    slots: list[list[int]]
    logits_rows: list[int]
    spans: list[list[Span]]
    rows: int
    fed: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        sequences: Sequence[BatchedSequence],
        kv: PagedKv,
        padded: Callable[[int], int],
        fed: torch.Tensor | None = None,
    ) -> TokenBatch:
        """`padded` gives the row count that a number of rows runs on."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[list[int]] = [[] for _ in kv.groups]
        spans: list[list[Span]] = [[] for _ in kv.groups]
        size = kv.page_size
        logits_rows: list[int] = []
        scored_rows: list[int] = []
        for sequence in sequences:
            first, count = len(tokens), len(sequence.tokens)
            end = sequence.table.length
            start = end - count
            for place, (group, run) in enumerate(zip(kv.groups, sequence.table.runs, strict=True)):
                pages, freed = kv.places(place, run.pages), run.freed * group.slices
                spans[place].append(Span(first, count, start, pages, freed, id(run)))
                slots[place] += [pages[p // size - freed] * size + p % size for p in range(start, end)]
            if sequence.scored:
                scored_rows += [first + place for place in sequence.scored]
            tokens += sequence.tokens
            positions += range(start, end)
            logits_rows += range(first + count - sequence.logits, first + count)
        rows = len(tokens)
        padding = padded(rows) - rows
        tokens.extend([0] * padding)
        positions.extend([0] * padding)
        for each in slots:
            each.extend([kv.padding_slot] * padding)
        return cls(tokens, positions, slots, logits_rows + scored_rows, spans, rows, fed)

    @property
    def padded_rows(self) -> int:
        return len(self.tokens)

    @property
    def is_ragged(self) -> bool:
        """Whether sequences differ in length or in rows."""
        return len({(span.start, span.rows) for span in self.spans[0]}) > 1


@dataclass(frozen=True, slots=True)
class PreparedPass:
    """A pass that is on its device: `compute` gives logits `[logits_rows, vocabulary]`, which hold until the next pass.
    `planning` is how many seconds the plan of its attention took."""

    compute: Callable[[], torch.Tensor]
    planning: float
