"""Attention over paged KV on a GPU, by a Triton kernel that reads the pages where they lie.

torch's own attention over pages (`torch.nn.attention.varlen` with a block table) is not used: it came for
FlashAttention 3, which torch does not carry (pytorch/pytorch#175101), and where it splits KV it writes wrong rows
(pytorch/pytorch#194167, open in November 2026).

Here a row's sums have one order by construction. Split s of a sequence is its positions `[256 s, 256 (s + 1))`. Within
a split, tiles of one size are added up from the first position to the last; splits are merged in order, beginning with
split 0, by the same float32 operations wherever that happens. Splits and tiles that a row does not see change none of
its bits.

So a block of query rows can be one item of work, whose program computes and merges all splits, or an item for each
split: every program then leaves its sums in memory, and the last one to be done merges them all. It keeps a GPU busy
where few rows have long contexts. Or, in long prefills, several blocks are one item, a wide tile: they take turns with
the keys and values that its program has loaded. Which it is does not show in the bits: a block's operations are the
same, on operands of the same shapes, and no compiler fuses them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from spool.engine.attention.backends import AttentionRule, Block, Span, blocks_of, cut_into_blocks
from spool.engine.cuda.launches import launch
from spool.engine.cuda.triton_product import launch_options, overlaps, wait_for_turn
from spool.engine.kv.kv_store import SCALE_BYTES
from spool.engine.kv.paged_kv import LayerKv
from spool.engine.passes.device import pinned

# Query rows of a block, and dimensions, the fewest that matrix units take.
_TILE_QUERIES = 16
_MIN_DIMENSIONS = 16
# Dimensions of heads at most: the numbers of a program fit into registers.
_MAX_DIMENSIONS = 256
# Blocks of a wide tile, and dimensions of its heads at most.
_WIDE_BLOCKS, _WIDE_DIMENSIONS = 4, 128
# Positions of a split: a multiple of the positions of any tile.
_SPLIT = 256
# Splits whose sums a program that merges has on their way to it, and one.
_MERGE_STAGES = 4
# Warps of a program, positions of a tile and bytes of its keys at most: these decide about the order of sums.
_WARPS = 8
_TILE_POSITIONS, _MIN_POSITIONS = 64, 16
_TILE_BYTES = 16 << 10
# How far ahead tiles are loaded. 3: a tile is loaded when the last one is done; 5: one tile earlier; 7: two.
_STAGES = 5
# Of a thread, at most, where the numbers of a tile fit: those of up to so many dimensions, in elements of 2 bytes that
# are multiplied as they lie. Then two programs share the registers of a multiprocessor, else one has them.
_REGISTERS, _SHARING_DIMENSIONS = 128, 128
# For each multiprocessor, over all groups of heads: programs share the items of work.
_PROGRAMS = 4
# Multiprocessors that the interpreter is said to have: it runs programs one after the other.
_INTERPRETED_MULTIPROCESSORS = 2
# Numbers of an item: first row, rows, position of the first row, place of the first page among all pages, split, and
# where the sums of the block's split 0 are kept, or -1 if the item is all splits of its block.
_ITEM_NUMBERS = tl.constexpr(6)
# What rows that have seen nothing have for their highest score: less than scores are, and no cause of NaN.
_LOWEST = tl.constexpr(-3.0e38)
_LOG2_E = tl.constexpr(math.log2(math.e))
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)

WIDE_FROM = 1.0
"""Wide tiles that a pass could have for each multiprocessor, over all groups of heads, from which on it has them."""

KEPT_ROWS = 1 << 17
"""Rows of tiles, over all groups of heads, whose sums of one split can be kept: 64 MiB for heads of 128 dimensions."""


@triton.jit
def _merged(highest, total, sums, next_highest, next_total, next_sums):  # type: ignore[no-untyped-def]
    """Highest scores, sums of weights and weighted sums of rows, with those of their next split."""
    higher = tl.maximum(highest, next_highest)
    kept = tl.exp2(highest - higher)
    factor = tl.exp2(next_highest - higher)
    # Named, as what a compiler fuses could differ from place to place.
    total = tl.fma(total, kept, next_total * factor)
    sums = tl.fma(sums, kept[:, None], next_sums * factor[:, None])
    return higher, total, sums


@triton.jit
def _all_merged(before, after):  # type: ignore[no-untyped-def]
    """`_merged` of each block."""
    found = ()
    for block in tl.static_range(len(before)):
        found += (_merged(*before[block], *after[block]),)  # type: ignore[assignment]
    return found


@triton.jit
def _item(numbers, index):  # type: ignore[no-untyped-def]
    """The numbers of an item; positions, and counts of them, fit into 32 bits."""
    item = numbers + index * _ITEM_NUMBERS
    first_row, first_page, first_kept = tl.load(item), tl.load(item + 3), tl.load(item + 5)
    rows, start, split = tl.load(item + 1).to(tl.int32), tl.load(item + 2).to(tl.int32), tl.load(item + 4).to(tl.int32)
    return first_row, rows, start, first_page, split, first_kept


# One program for all places of the pass's numbers in memory.
@triton.jit(do_not_specialize_on_alignment=["edges", "numbers", "pages"])
def _attend(  # type: ignore[no-untyped-def]
    # Triton takes no annotation of a parameter but tl.constexpr.
    to,
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    edges,
    numbers,
    pages,
    kept_rows,
    kept_sums,
    arrived,
    sinks,
    scale,
    softcap,
    window: tl.constexpr,
    capped: tl.constexpr,
    kv_heads: tl.constexpr,
    groups: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    blocks: tl.constexpr,
    tile_queries: tl.constexpr,
    dimensions: tl.constexpr,
    tile_positions: tl.constexpr,
    split_positions: tl.constexpr,
    merge_stages: tl.constexpr,
    precision: tl.constexpr,
    overlap: tl.constexpr,
):
    """Items of one of the `groups` of `group` query heads that share a KV head. `scale`, or `softcap` where scores are
    `capped`, is for powers of 2; `window` 0: none; `sinks` `[query heads]` or None; an item has up to `blocks` of
    `tile_queries` rows, which are padded, as `dimensions` are: of several only where `group` divides `tile_queries`,
    and such items are not split. With scales, keys and values are codes of 8 bits: these are multiplied, and scales
    multiply scores and weights.

    `kept_rows` `[splits, groups, 2, tile_queries]` highest scores and sums of weights, `kept_sums` `[splits, groups,
    tile_queries, head_dim]`; `arrived` `[splits, groups]` counts the splits of a block that are kept, 0 between
    launches.
    """
    this_group = tl.program_id(1)
    kv_head = this_group // (groups // kv_heads)
    row_size: tl.constexpr = head_dim if key_scales is None else head_dim + _SCALE_BYTES
    tile_row = tl.arange(0, tile_queries)
    row = tile_row // group
    dimension = tl.arange(0, dimensions)
    block_rows: tl.constexpr = tile_queries // group
    block_size: tl.constexpr = block_rows * groups * group * head_dim
    # Of blocks whose rows have seen nothing: highest scores, sums of weights and weighted sums.
    lowest, zeros = tl.full([tile_queries], _LOWEST, tl.float32), tl.zeros([tile_queries], tl.float32)
    nothing = ((lowest, zeros, tl.zeros([tile_queries, dimensions], tl.float32)),) * blocks
    wait_for_turn(overlap)
    items = tl.load(edges).to(tl.int32)
    # Loaded before it is known whether there is one: there is room for an item of each program.
    first_row, rows, start, first_page, split, first_kept = _item(numbers, tl.program_id(0))
    for index in range(tl.program_id(0), items, tl.num_programs(0)):
        # In the order [rows, query heads, dimensions], the query heads of a group side by side.
        head = ((first_row + row) * groups + this_group) * group + tile_row % group
        places = head[:, None] * head_dim + dimension[None, :]
        query = ()
        for block in tl.static_range(blocks):
            is_real = (row + block * block_rows < rows)[:, None] & (dimension < head_dim)[None, :]
            query += (tl.load(queries + places + block * block_size, mask=is_real, other=0.0),)  # type: ignore[assignment]
        end = start + rows
        stop = end
        if first_kept >= 0:
            stop = tl.minimum(end, (split + 1) * split_positions)
        # Of the splits before the one at work, then of that one.
        found = nothing
        parts = nothing
        begin = split * split_positions
        if window > 0:
            # Tiles that no row sees would change nothing.
            begin = tl.maximum(begin, tl.maximum(start + 1 - window, 0) // tile_positions * tile_positions)
        for first in range(begin, stop, tile_positions):
            if first % split_positions == 0:
                found = _all_merged(found, parts)
                parts = nothing
            position = first + tl.arange(0, tile_positions)
            exists = position < end
            # Unsigned, so that quotients by powers of 2 are shifts.
            place = position.to(tl.uint32)
            page = tl.load(pages + first_page + place // page_size, mask=exists, other=0).to(tl.int32)
            head_of_page = (page * kv_heads + kv_head).to(tl.int64)
            chunk = head_of_page * (page_size * row_size)
            kv_places = (chunk + place % page_size * head_dim)[:, None] + dimension[None, :]
            is_kv = exists[:, None] & (dimension < head_dim)[None, :]
            key = tl.load(keys + kv_places, mask=is_kv, other=0).to(to.dtype.element_ty)
            seen = ()
            for block in tl.static_range(blocks):
                scores = tl.dot(query[block], tl.trans(key), input_precision=precision)
                if key_scales is not None:
                    scale_places = head_of_page * (page_size * row_size // _SCALE_BYTES) + place % page_size
                    scores *= tl.load(key_scales + scale_places, mask=exists, other=0.0)[None, :]
                scores *= scale
                if capped:
                    # Of tanh(x) as 1 - 2 / (e^2x + 1).
                    scores = softcap - tl.div_rn(softcap * 2, tl.exp2(scores) + 1)
                last_seen = start + tl.minimum(row + block * block_rows, rows - 1)
                is_seen = position[None, :] <= last_seen[:, None]
                if window > 0:
                    is_seen &= position[None, :] > last_seen[:, None] - window
                scores = tl.where(is_seen, scores, float("-inf"))
                # A tile that a row does not see changes none of its bits: the factor is 1, what is added is 0.
                highest, total, sums = parts[block]
                higher = tl.maximum(highest, tl.max(scores, 1))
                weights = tl.exp2(scores - higher[:, None])
                kept = tl.exp2(highest - higher)
                if block == 0:
                    value = tl.load(values + kv_places, mask=is_kv, other=0).to(key.dtype)
                shares = weights
                if value_scales is not None:
                    shares = weights * tl.load(value_scales + scale_places, mask=exists, other=0.0)[None, :]
                sums = tl.dot(shares.to(value.dtype), value, sums * kept[:, None], input_precision=precision)
                seen += ((higher, tl.fma(total, kept, tl.sum(weights, 1)), sums),)  # type: ignore[assignment]
            parts = seen
        is_done = first_kept < 0
        if is_done:
            found = _all_merged(found, parts)
        elif blocks == 1:
            highest, total, sums = found[0]
            split_highest, split_total, split_sums = parts[0]
            splits = (end + split_positions - 1) // split_positions
            first_place = first_kept * groups + this_group
            place = first_place + split * groups
            tl.store(kept_rows + place * 2 * tile_queries + tile_row, split_highest)
            tl.store(kept_rows + (place * 2 + 1) * tile_queries + tile_row, split_total)
            kept_places = tile_row[:, None] * head_dim + dimension[None, :]
            tl.store(kept_sums + place * tile_queries * head_dim + kept_places, split_sums, mask=is_real)
            # What all threads stored is there before the count says so, and what all load is loaded after it.
            tl.debug_barrier()
            is_done = tl.atomic_add(arrived + first_place, 1, sem="acq_rel", scope="gpu") == splits - 1
            if is_done:
                for done in tl.range(splits, num_stages=merge_stages):
                    place = first_place + done * groups
                    split_highest = tl.load(kept_rows + place * 2 * tile_queries + tile_row)
                    split_total = tl.load(kept_rows + (place * 2 + 1) * tile_queries + tile_row)
                    split_sums = tl.load(
                        kept_sums + place * tile_queries * head_dim + kept_places, mask=is_real, other=0.0
                    )
                    highest, total, sums = _merged(highest, total, sums, split_highest, split_total, split_sums)
                tl.store(arrived + first_place, 0)
            found = ((highest, total, sums),)
        if is_done:
            for block in tl.static_range(blocks):
                highest, total, sums = found[block]
                if sinks is not None:
                    sink = tl.load(sinks + this_group * group + tile_row % group) * _LOG2_E
                    highest, total, sums = _merged(highest, total, sums, sink, 1.0, tl.zeros_like(sums))
                output = sums * tl.div_rn(1.0, total)[:, None]
                is_real = (row + block * block_rows < rows)[:, None] & (dimension < head_dim)[None, :]
                tl.store(to + places + block * block_size, output.to(to.dtype.element_ty), mask=is_real)
        if index + tl.num_programs(0) < items:
            first_row, rows, start, first_page, split, first_kept = _item(numbers, index + tl.num_programs(0))


def _launch_values(blocks: int, query_heads: int, layer: LayerKv, overlap: bool) -> dict[str, object]:
    """The constants that the kernel is compiled with for a model's heads, and how it is compiled."""
    dimensions = max(_MIN_DIMENSIONS, triton.next_power_of_2(layer.head_dim))
    element_bytes, group = layer.dtype.itemsize, _group(query_heads // layer.kv_heads)
    values: dict[str, object] = {
        "kv_heads": layer.kv_heads,
        "groups": query_heads // group,
        "group": group,
        "head_dim": layer.head_dim,
        "page_size": layer.page_size,
        "blocks": blocks,
        "tile_queries": _TILE_QUERIES,
        "dimensions": dimensions,
        "tile_positions": max(_MIN_POSITIONS, min(_TILE_POSITIONS, _TILE_BYTES // (dimensions * element_bytes))),
        "split_positions": _SPLIT,
        "merge_stages": _MERGE_STAGES,
        # Elements that are not 16 bits wide are multiplied as they are, and not as TF32.
        "precision": "ieee",
        "overlap": overlap,
        "num_warps": _WARPS,
        "num_stages": _STAGES,
        # What is fused could differ from tile to tile. Products in float32 are: they have no wide tiles.
        "enable_fp_fusion": element_bytes > 2,
    }
    if blocks == 1 and dimensions <= _SHARING_DIMENSIONS and element_bytes == 2 and not layer.quantized:
        values["maxnreg"] = _REGISTERS
    return values | launch_options(overlap)


def _group(sharing: int) -> int:
    """Query heads of a program, all of one KV head, where `sharing` share it: as many as a tile has rows at most."""
    return max(count for count in range(1, _TILE_QUERIES + 1) if sharing % count == 0)


def check_fits(head_dim: int, dtype: torch.dtype, quantized_kv: bool) -> None:
    """Raises ValueError where the numbers of a program do not fit into registers."""
    if head_dim > _MAX_DIMENSIONS:
        raise ValueError(f"heads have {head_dim} dimensions, it takes at most {_MAX_DIMENSIONS}")
    if quantized_kv and dtype == torch.float32:
        # Products without matrix units keep whole operands in registers, where codes are expanded.
        raise ValueError("KV is in 8 bits and dtype float32, it takes bfloat16 or float16 then")


def takes_wide_tiles(heads: tuple[int, int, int], dtype: torch.dtype, quantized_kv: bool) -> bool:
    """Whether the numbers of wide tiles fit into registers, where layers have no rules: for query heads, KV heads,
    dimensions of a head."""
    fills_tiles = _TILE_QUERIES % _group(heads[0] // heads[1]) == 0
    return fills_tiles and heads[2] <= _WIDE_DIMENSIONS and dtype.itemsize == 2 and not quantized_kv


class _Launch(NamedTuple):
    """Items of up to so many blocks. `numbers` as `TritonBackend.numbers` gives them, int64 on the device, with room
    for at least an item of each of `programs`, which are those of one group of heads; `pages`: what they point to."""

    blocks: int
    numbers: torch.Tensor
    programs: int
    pages: torch.Tensor


class TritonPlan:
    def __init__(self, launches: Sequence[_Launch], kept_splits: int, overlap: bool) -> None:
        """`kept_splits` splits of blocks can be kept."""
        self._launches = launches
        self._kept_splits = kept_splits
        self._overlap = overlap
        self._output: torch.Tensor | None = None
        self._kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        self._values: list[dict[str, object]] = []
        self._groups = 0

    def attend(self, layer: LayerKv, query: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """The output holds until the next call, which has the next layer's."""
        heads, head_dim = query.shape[1:]
        if self._output is None:
            # Rows of no block stay 0 in all layers.
            self._output = query.new_zeros(query.shape)
            self._values = [_launch_values(launch.blocks, heads, layer, self._overlap) for launch in self._launches]
            self._groups = heads // _group(heads // layer.kv_heads)
            places = (self._kept_splits, self._groups)
            self._kept = (
                query.new_empty(*places, 2, _TILE_QUERIES, dtype=torch.float32),
                query.new_empty(*places, _TILE_QUERIES, head_dim, dtype=torch.float32),
                query.new_zeros(places, dtype=torch.int32),
            )
        for one, values in zip(self._launches, self._values, strict=True):
            launch(
                _attend,
                (one.programs, self._groups),
                self._output,
                query.contiguous(),
                *layer.pool,
                *layer.scales,
                one.numbers[:1],
                one.numbers[1:],
                one.pages,
                *self._kept,
                rule.sinks,
                rule.scaling * _LOG2_E.value * (2 / rule.softcap if rule.softcap else 1),
                (rule.softcap or 0.0) * _LOG2_E.value,
                window=rule.window or 0,
                capped=rule.softcap is not None,
                **values,
            )
        return self._output


class TritonBackend:
    """Gives a row the same bits whatever shares its pass."""

    def __init__(
        self,
        query_heads: int,
        kv_heads: int,
        page_size: int,
        device: torch.device,
        overlap: bool | None = None,
        wide_from: float = math.inf,
    ) -> None:
        """`overlap`: whether the kernel overlaps with others, None: where the device can have it; `wide_from` as
        `WIDE_FROM`, infinite unless `takes_wide_tiles`."""
        group = _group(query_heads // kv_heads)
        groups = query_heads // group
        self._block_rows = _TILE_QUERIES // group
        self._kept_splits = KEPT_ROWS // (_TILE_QUERIES * groups)
        multiprocessors = _multiprocessors(device)
        self._programs = max(1, multiprocessors * _PROGRAMS // groups)
        self._min_wide = wide_from * multiprocessors / groups
        self._page_size = page_size
        self._device = device
        self._overlap = overlaps(device) if overlap is None else overlap

    def plan(self, spans: Sequence[Span], batched_tokens: int) -> TritonPlan:
        wide_rows = self._block_rows * _WIDE_BLOCKS
        wide = [span for span in spans if span.rows >= wide_rows]
        if sum(span.rows // wide_rows for span in wide) < self._min_wide:
            wide = []
        narrow = [span for span in spans if not wide or span.rows < wide_rows]
        launches = [
            self._launch(blocks, cut_into_blocks(some, self._page_size, rows), kept_splits)
            for blocks, some, rows, kept_splits in (
                (1, narrow, self._block_rows, self._kept_splits),
                (_WIDE_BLOCKS, wide, wide_rows, 0),
            )
            if some
        ]
        return TritonPlan(launches, self._kept_splits, self._overlap)

    def _launch(self, blocks: int, cut: tuple[list[Block], list[int]], kept_splits: int) -> _Launch:
        numbers = _numbers(cut[0], kept_splits)
        both = pinned(np.concatenate((numbers, cut[1])), self._device).to(self._device, non_blocking=True)
        items, pages = both.split([len(numbers), len(cut[1])])
        return _Launch(blocks, items, min(int(numbers[0]), self._programs), pages)

    def numbers(self, spans: Sequence[Span], first_places: Sequence[int]) -> np.ndarray:
        return _numbers(blocks_of(spans, first_places, self._block_rows), self._kept_splits)

    def max_numbers(self, rows: int) -> int:
        return 1 + max(rows + self._kept_splits, self._programs) * _ITEM_NUMBERS.value

    def plan_of(self, numbers: torch.Tensor, pages: torch.Tensor) -> TritonPlan:
        return TritonPlan([_Launch(1, numbers, self._programs, pages)], self._kept_splits, self._overlap)


def _numbers(blocks: Sequence[Block], kept_splits: int) -> np.ndarray:
    """How many items of work there are, and the items.

    Those that take longest come first. The longest blocks are split, as many as `kept_splits` splits allow.
    """
    whole: list[tuple[int, ...]] = []
    split: list[tuple[int, ...]] = []
    kept = 0
    for block in sorted(blocks, key=lambda block: -block[1] - block[2]):
        splits = -(-(block[1] + block[2]) // _SPLIT)
        if splits > 1 and kept + splits <= kept_splits:
            split.append((*block, splits, kept))
            kept += splits
        else:
            whole.append((*block, 0, -1))
    items = np.array([*whole, *split], np.int64).reshape(-1, _ITEM_NUMBERS.value)
    # A split block is an item for each of its splits.
    counts = np.ones(len(items), np.int64)
    counts[len(whole) :] = items[len(whole) :, 4]
    firsts = counts.cumsum() - counts
    items = items.repeat(counts, axis=0)
    items[len(whole) :, 4] = (np.arange(len(items)) - firsts.repeat(counts))[len(whole) :]
    return np.concatenate(([len(items)], items.ravel()))


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
