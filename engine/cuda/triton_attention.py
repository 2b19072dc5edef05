"""Attention over paged KV on a GPU, by a Triton kernel that reads the pages where they lie.

torch's own attention over pages (`torch.nn.attention.varlen` with a block table) is not used: it came for
FlashAttention 3, which torch does not carry (pytorch/pytorch#175101), and where it splits KV it writes wrong rows
(pytorch/pytorch#194167, open in November 2026). Here a row's sums have one order by construction: no split, and tiles
of one size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engine.attention.backends import Span, cut_into_blocks
from engine.kv.paged_kv import LayerKv
from engine.passes.device import on_device

# Rows and dimensions of a tile, the fewest that matrix units take.
_MIN_QUERIES = 16
_MIN_DIMENSIONS = 16
# Positions that a tile of scores covers, at most. Fewer where their keys would take more bytes than this, by the bytes
# of an element: a tile of keys and one of values are in a multiprocessor's shared memory at a time, and what is
# multiplied without matrix units is in registers.
_POSITIONS = 64
_TILE_BYTES = {2: 32 << 10, 4: 16 << 10}


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    # Triton takes no annotation of a parameter but tl.constexpr.
    to,
    queries,
    keys,
    values,
    edges,
    pages,
    scale,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    tile_queries: tl.constexpr,
    dimensions: tl.constexpr,
    tile_positions: tl.constexpr,
    precision: tl.constexpr,
):
    """One block of rows, one KV head. `scale` is for powers of 2; `tile_queries` and `dimensions` are padded."""
    edge = edges + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    first_row, rows, start, first_page = tl.load(edge), tl.load(edge + 1), tl.load(edge + 2), tl.load(edge + 3)
    row = tl.arange(0, tile_queries) // group
    dimension = tl.arange(0, dimensions)
    # In the order [rows, query heads, dimensions], the query heads of a KV head side by side.
    head = ((first_row + row) * kv_heads + kv_head) * group + tl.arange(0, tile_queries) % group
    places = head[:, None] * head_dim + dimension[None, :]
    is_real = (row < rows)[:, None] & (dimension < head_dim)[None, :]
    query = tl.load(queries + places, mask=is_real, other=0.0)
    last_seen = start + tl.minimum(row, rows - 1)
    highest = tl.full([tile_queries], float("-inf"), tl.float32)
    total = tl.zeros([tile_queries], tl.float32)
    sums = tl.zeros([tile_queries, dimensions], tl.float32)
    for first in range(0, start + rows, tile_positions):
        position = first + tl.arange(0, tile_positions)
        exists = position < start + rows
        page = tl.load(pages + first_page + position // page_size, mask=exists, other=0)
        chunk = ((page * kv_heads + kv_head) * page_size + position % page_size) * head_dim
        is_kv = exists[:, None] & (dimension < head_dim)[None, :]
        kv_places = chunk[:, None] + dimension[None, :]
        key = tl.load(keys + kv_places, mask=is_kv, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=precision) * scale
        scores = tl.where(position[None, :] <= last_seen[:, None], scores, float("-inf"))
        # A tile that a row does not see changes none of its bits: the factor is 1, what is added is 0.
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        kept = tl.exp2(highest - higher)
        value = tl.load(values + kv_places, mask=is_kv, other=0.0)
        sums = sums * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=precision)
        total = total * kept + tl.sum(weights, 1)
        highest = higher
    # Of a real row the highest score has weight 1; a block of zeros has no weights.
    total = tl.maximum(total, 1.0)
    tl.store(to + places, (sums / total[:, None]).to(to.dtype.element_ty), mask=is_real)


def constants(query_heads: int, kv_heads: int, head_dim: int, page_size: int, element_bytes: int) -> dict[str, object]:
    """What the kernel is compiled with, for a model's heads, pages of so many positions, and elements of a size."""
    dimensions = max(_MIN_DIMENSIONS, triton.next_power_of_2(head_dim))
    return {
        "kv_heads": kv_heads,
        "group": query_heads // kv_heads,
        "head_dim": head_dim,
        "page_size": page_size,
        "tile_queries": tile_rows(query_heads // kv_heads),
        "dimensions": dimensions,
        "tile_positions": min(_POSITIONS, _TILE_BYTES[element_bytes] // (dimensions * element_bytes)),
        # Elements that are no 16 bits wide are multiplied as they are, and not as TF32.
        "precision": "ieee",
    }


def options(element_bytes: int) -> dict[str, int]:
    """How the kernel is compiled: so that numbers stay in registers, instead of giving some up for more programs."""
    return {"num_warps": 4, "maxnreg": 255} if element_bytes == 2 else {"num_warps": 4}


def tile_rows(group: int) -> int:
    """Query rows of a tile, for so many query heads that share a KV head."""
    return max(_MIN_QUERIES, triton.next_power_of_2(group))


class TritonPlan:
    def __init__(self, edges: torch.Tensor, pages: torch.Tensor) -> None:
        """`edges` int64 `[blocks, 4]` and `pages` as from `cut_into_blocks`, on the device; a block of zeros is
        none."""
        self._edges = edges
        self._pages = pages
        self._output: torch.Tensor | None = None
        self._constants: dict[str, object] = {}
        self._options: dict[str, int] = {}

    def attend(self, layer: LayerKv, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """The output holds until the next call, which has the next layer's."""
        heads, head_dim = query.shape[1:]
        if self._output is None:
            # Rows of no block stay 0 in all layers.
            self._output = query.new_zeros(query.shape)
            self._constants = constants(heads, layer.kv_heads, head_dim, layer.pool.shape[3], query.element_size())
            self._options = options(query.element_size())
        keys, values = layer.pool
        _attend[(len(self._edges), layer.kv_heads)](
            self._output,
            query.contiguous(),
            keys,
            values,
            self._edges,
            self._pages,
            scaling * math.log2(math.e),
            **self._constants,
            **self._options,
        )
        return self._output


class TritonBackend:
    """Gives a row the same bits whatever shares its pass."""

    def __init__(self, query_heads: int, kv_heads: int, page_size: int, device: torch.device) -> None:
        group = query_heads // kv_heads
        self._block_rows = tile_rows(group) // group
        self._page_size = page_size
        self._device = device

    def plan(self, spans: Sequence[Span], batched_tokens: int) -> TritonPlan:
        edges, pages = self.blocks(spans)
        moved = on_device([*edges, *pages], self._device)
        return self.plan_of(moved[: len(edges)].view(-1, 4), moved[len(edges) :])

    def blocks(self, spans: Sequence[Span]) -> tuple[list[int], list[int]]:
        """Edges, four numbers for each block, and pages."""
        edges, pages = cut_into_blocks(spans, self._page_size, self._block_rows)
        return [number for edge in edges for number in edge], pages

    def plan_of(self, edges: torch.Tensor, pages: torch.Tensor) -> TritonPlan:
        """Of blocks that are on the device already."""
        return TritonPlan(edges, pages)
