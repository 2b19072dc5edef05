"""Attention of a batch over paged KV.

A backend turns the layout of a pass into a plan once, and the plan then attends in every layer. Both read the pages
where they lie: engine/cpu/attention.py on CPUs, engine/cuda/triton_attention.py on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from spool.engine.kv.paged_kv import LayerKv

# Kernels that read pages look at whole tiles of at most so many positions: also at some before the first that is seen.
TILE_POSITIONS = 64


@dataclass(slots=True)
class Span:
    """Rows `[first_row, first_row + rows)` of a batch: positions `[start, start + rows)` of the sequence on `pages`,
    but for the first `freed`, of which no row sees a position. `owner`: a number that this sequence has in all passes.
    """

    first_row: int
    rows: int
    start: int
    pages: Sequence[int]
    freed: int = 0
    owner: int = 0


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer attends.

    A score is the product of a query and a key times `scaling`; with `softcap` c it becomes c tanh(score / c). A row
    sees the last `window` positions up to its own; None: all. `sinks`, float32 `[query heads]`, are one more score of
    each head, which has a share and no value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


Block = tuple[int, int, int, int]
"""Its first row, its rows, the position of the first, and where in a list of pages those of its sequence begin."""


def cut_into_blocks(spans: Sequence[Span], page_size: int, max_rows: int) -> tuple[list[Block], list[int]]:
    """What kernels that read pages take: blocks of at most `max_rows` rows of one sequence, and the list of pages. A
    tile's freed pages are others of its sequence there, and those before them are left out."""
    first_places: list[int] = []
    pages: list[int] = []
    for span in spans:
        left_out = max(0, span.freed - tile_pages(page_size))
        first_places.append(len(pages) - left_out)
        pages.extend([span.pages[0]] * (span.freed - left_out))
        pages.extend(span.pages[: -(-(span.start + span.rows) // page_size) - span.freed])
    return blocks_of(spans, first_places, max_rows), pages


def blocks_of(spans: Sequence[Span], first_places: Sequence[int], max_rows: int) -> list[Block]:
    """`first_places`: where the pages of each span begin."""
    return [
        (span.first_row + done, min(max_rows, span.rows - done), span.start + done, place)
        for span, place in zip(spans, first_places, strict=True)
        for done in range(0, span.rows, max_rows)
    ]


def tile_pages(page_size: int) -> int:
    """Freed pages of a sequence that kernels may look at."""
    return -(-TILE_POSITIONS // page_size)


class AttentionPlan(Protocol):
    def attend(self, layer: LayerKv, query: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """`query` `[rows, heads, head_dim]` over a layer's pages; gives the same shape."""
        ...


class AttentionBackend(Protocol):
    def plan(self, spans: Sequence[Span], batched_tokens: int) -> AttentionPlan:
        """`batched_tokens` counts the padding rows at the end, which belong to no span."""
        ...
