"""Passes that give all tokens of proposals at once: which rows they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spool.engine.attention.backends import Span
from spool.engine.kv.paged_kv import PagedKv
from spool.engine.passes.layout import TokenBatch


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of one sequence: their `tokens`, at consecutive positions, the first of which has the features of the
    last pair. `proposing`: the rows that tokens are proposed from. `is_causal`: otherwise each row sees all of them."""

    tokens: list[int]
    proposing: range
    is_causal: bool = True


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """From `position` on, in a sequence on `pages` that is seen from page `first_page` on; `owner` as in `Span`."""

    block: Block
    pages: Sequence[int]
    position: int
    first_page: int
    owner: int


def features_of_blocks(blocks: Sequence[Block]) -> list[int]:
    """Of each row, whose features it has: those of the block with this number, or -1 for a mask's."""
    return [at for number, block in enumerate(blocks) for at in (number, *[-1] * (len(block.tokens) - 1))]


def batch_of_blocks(placed: Sequence[PlacedBlock], kv: PagedKv, padded: Callable[[int], int]) -> TokenBatch:
    """`padded` as in `TokenBatch.of`. Wants logits of the rows that propose."""
    size, spans = kv.page_size, list[Span]()
    tokens, slots, positions, proposing = (list[int]() for _ in range(4))
    for one in placed:
        block, first, rows = one.block, len(tokens), len(one.block.tokens)
        seen, start = one.pages[one.first_page :], one.position - one.first_page * size
        if block.is_causal:
            spans.append(Span(first, rows, start, seen, owner=one.owner))
        else:
            # Each row attends as the last one does.
            spans += [Span(first + row, 1, start + rows - 1, seen, owner=one.owner) for row in range(rows)]
        proposing += [first + row for row in block.proposing]
        tokens += block.tokens
        for position in range(one.position, one.position + rows):
            slots.append(one.pages[position // size] * size + position % size)
            positions.append(position)
    rows = len(tokens)
    padding = [0] * (padded(rows) - rows)
    slots += [kv.padding_slot] * len(padding)
    return TokenBatch(tokens + padding, positions + padding, [slots], proposing, [spans], rows)
