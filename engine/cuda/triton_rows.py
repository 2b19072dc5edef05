"""What a GPU does to each row between the linear layers of a decoder layer, but for attention: Triton kernels.

All compute in float32 and round once. A row's sums are those of one program, in tiles whose size the model alone
decides, so that they have one order by construction. Tensors are contiguous. Products come in `Parts`, which add up to
the bits of the whole product. With `overlap`, only where kernels can (engine/cuda/triton_product.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spool.engine.cuda.launches import launch
from spool.engine.cuda.triton_product import Parts, add_parts, launch_options, wait_for_turn
from spool.engine.kv.kv_store import SCALE_BYTES
from spool.engine.kv.paged_kv import LayerKv

# Heads that a program rotates. Few, so that one row alone keeps more than one multiprocessor busy.
_TILE_HEADS = 4
# Numbers of a product of gates that a program computes.
_GATES = 1024
# Numbers of a row for each warp that normalizes it, and the most warps.
_NUMBERS_OF_A_WARP = 256
_MAX_WARPS = 16
# The smallest normal number.
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
_ROUNDING = tl.constexpr(1.5 * 2**23)
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)

HeadNorms = tuple[torch.Tensor, torch.Tensor, float]
"""Weights of the norms of a query head and of a key head, and their epsilon."""


@triton.jit
def _scale_of(first, second):  # type: ignore[no-untyped-def]
    """Of rows in two halves, as `quantized_rows` (engine/kv/paged_kv.py) has it; `_codes`, too."""
    # As whole numbers, magnitudes have the same order, with NaN above all.
    magnitudes = tl.maximum(
        first.to(tl.int32, bitcast=True) & 0x7FFFFFFF, second.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    )
    scale = tl.div_rn(tl.max(magnitudes, 1).to(tl.float32, bitcast=True), 127.0)
    return tl.where(scale < _SMALLEST_SCALE, 0.0, scale)


@triton.jit
def _codes(rows, scale):  # type: ignore[no-untyped-def]
    codes = tl.div_rn(rows, tl.broadcast_to(scale[:, None], rows.shape))
    codes = tl.where(tl.abs(codes) < 127.5, codes, 0.0)
    # Adding this rounds to a whole number, to even from the middle between two.
    return ((codes + _ROUNDING) - _ROUNDING).to(tl.int8)


@triton.jit
def _rotate_write(  # type: ignore[no-untyped-def]
    # Triton takes no annotation of a parameter but tl.constexpr.
    queries,
    keys,
    values,
    qkv,
    bias,
    cos,
    sin,
    slots,
    key_scales,
    value_scales,
    query_norm,
    key_norm,
    epsilon,
    parts: tl.constexpr,
    overlap: tl.constexpr,
    query_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    tile_heads: tl.constexpr,
    dimensions: tl.constexpr,
):
    """Some heads of one row. `dimensions` is half a head's, padded. With scales, keys and values are written as codes
    of 8 bits."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)
    dimension = tl.arange(0, dimensions)
    half: tl.constexpr = head_dim // 2
    in_half = dimension < half
    is_query = (head < query_heads)[:, None]
    is_value = (head >= query_heads + kv_heads)[:, None]
    is_real = (head < query_heads + 2 * kv_heads)[:, None] & in_half[None, :]
    # Reads are asked for before any is needed, weights before it is this kernel's turn; and for all heads, also those
    # that are the same for each, so that no thread waits for what another one has read.
    each = tl.zeros([tile_heads, 1], tl.int32) + dimension[None, :]
    if query_norm is not None:
        query_first = tl.load(query_norm + each, mask=is_real, other=0.0)
        query_second = tl.load(query_norm + half + each, mask=is_real, other=0.0)
        key_first = tl.load(key_norm + each, mask=is_real, other=0.0)
        key_second = tl.load(key_norm + half + each, mask=is_real, other=0.0)
    wait_for_turn(overlap)
    slot = tl.load(slots + row)
    angles = row * head_dim + each
    first_cos = tl.load(cos + angles, mask=is_real, other=0.0).to(tl.float32)
    first_sin = tl.load(sin + angles, mask=is_real, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + angles + half, mask=is_real, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + angles + half, mask=is_real, other=0.0).to(tl.float32)
    width: tl.constexpr = (query_heads + 2 * kv_heads) * head_dim
    count = tl.num_programs(0).to(tl.int64) * width
    of_bias = head[:, None] * head_dim + dimension[None, :]
    places = row * width + of_bias
    dtype: tl.constexpr = queries.dtype.element_ty
    given_first = add_parts(qkv, bias, places, of_bias, is_real, count, parts, dtype)
    given_second = add_parts(qkv, bias, places + half, of_bias + half, is_real, count, parts, dtype)
    first, second = given_first.to(tl.float32), given_second.to(tl.float32)
    if query_norm is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / head_dim + epsilon)[:, None]
        first = first * scale * tl.where(is_query, query_first, key_first).to(tl.float32)
        second = second * scale * tl.where(is_query, query_second, key_second).to(tl.float32)
    rotated_first = (first * first_cos - second * first_sin).to(dtype)
    rotated_second = (second * second_cos + first * second_sin).to(dtype)
    query_places = (row * query_heads + head)[:, None] * head_dim + dimension[None, :]
    tl.store(queries + query_places, rotated_first, mask=is_real & is_query)
    tl.store(queries + query_places + half, rotated_second, mask=is_real & is_query)
    kv_head = slot // page_size * kv_heads + (head - query_heads) % kv_heads
    is_key = is_real & (head >= query_heads)[:, None] & (head < query_heads + kv_heads)[:, None]
    if key_scales is None:
        kv_places = (kv_head * page_size + slot % page_size)[:, None] * head_dim + dimension[None, :]
        tl.store(keys + kv_places, rotated_first, mask=is_key)
        tl.store(keys + kv_places + half, rotated_second, mask=is_key)
        tl.store(values + kv_places, given_first, mask=is_real & is_value)
        tl.store(values + kv_places + half, given_second, mask=is_real & is_value)
    else:
        stored_first = tl.where(is_value, given_first, rotated_first).to(tl.float32)
        stored_second = tl.where(is_value, given_second, rotated_second).to(tl.float32)
        scale = _scale_of(stored_first, stored_second)
        first_codes, second_codes = _codes(stored_first, scale), _codes(stored_second, scale)
        head_bytes: tl.constexpr = page_size * (head_dim + _SCALE_BYTES)
        kv_places = (kv_head * head_bytes + slot % page_size * head_dim)[:, None] + dimension[None, :]
        tl.store(keys + kv_places, first_codes, mask=is_key)
        tl.store(keys + kv_places + half, second_codes, mask=is_key)
        tl.store(values + kv_places, first_codes, mask=is_real & is_value)
        tl.store(values + kv_places + half, second_codes, mask=is_real & is_value)
        scale_places = kv_head * (head_bytes // _SCALE_BYTES) + slot % page_size
        is_key_head = (head >= query_heads) & (head < query_heads + kv_heads)
        tl.store(key_scales + scale_places, scale, mask=is_key_head)
        is_value_head = (head >= query_heads + kv_heads) & (head < query_heads + 2 * kv_heads)
        tl.store(value_scales + scale_places, scale, mask=is_value_head)


@triton.jit
def _rotations(  # type: ignore[no-untyped-def]
    cos, sin, positions, frequencies, scaling, overlap: tl.constexpr, half: tl.constexpr, dimensions: tl.constexpr
):
    """One row. `dimensions` is half a head's, padded."""
    row = tl.program_id(0).to(tl.int64)
    dimension = tl.arange(0, dimensions)
    in_half = dimension < half
    frequency = tl.load(frequencies + dimension, mask=in_half, other=0.0).to(tl.float32)
    wait_for_turn(overlap)
    angles = frequency * tl.load(positions + row).to(tl.float32)
    places = row * (2 * half) + dimension
    dtype: tl.constexpr = cos.dtype.element_ty
    cosines, sines = (tl.cos(angles) * scaling).to(dtype), (tl.sin(angles) * scaling).to(dtype)
    tl.store(cos + places, cosines, mask=in_half)
    tl.store(cos + places + half, cosines, mask=in_half)
    tl.store(sin + places, sines, mask=in_half)
    tl.store(sin + places + half, sines, mask=in_half)


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    to,
    residual,
    added,
    bias,
    weight,
    epsilon,
    parts: tl.constexpr,
    overlap: tl.constexpr,
    hidden: tl.constexpr,
    block: tl.constexpr,
):
    """One row. `block` is `hidden`, padded."""
    place = tl.arange(0, block)
    places = tl.program_id(0).to(tl.int64) * hidden + place
    is_real = place < hidden
    factors = tl.load(weight + place, mask=is_real, other=0.0).to(tl.float32)
    wait_for_turn(overlap)
    row = tl.load(residual + places, mask=is_real, other=0.0).to(tl.float32)
    if added is not None:
        dtype: tl.constexpr = residual.dtype.element_ty
        count = tl.num_programs(0).to(tl.int64) * hidden
        row += add_parts(added, bias, places, place, is_real, count, parts, dtype).to(tl.float32)
        rounded = row.to(dtype)
        tl.store(residual + places, rounded, mask=is_real)
        row = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / hidden + epsilon)
    tl.store(to + places, (row * scale * factors).to(to.dtype.element_ty), mask=is_real)


@triton.jit
def _silu_mul(  # type: ignore[no-untyped-def]
    to, gate_up, bias, parts: tl.constexpr, overlap: tl.constexpr, inner: tl.constexpr, block: tl.constexpr
):
    """`block` numbers of one row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    is_real = place < inner
    wait_for_turn(overlap)
    dtype: tl.constexpr = to.dtype.element_ty
    count = tl.num_programs(0).to(tl.int64) * (2 * inner)
    places = row * (2 * inner) + place
    gate = add_parts(gate_up, bias, places, place, is_real, count, parts, dtype).to(tl.float32)
    up = add_parts(gate_up, bias, places + inner, place + inner, is_real, count, parts, dtype).to(tl.float32)
    product = gate / (1 + tl.exp(-gate)) * up
    tl.store(to + row * inner + place, product.to(dtype), mask=is_real)


def rotations(
    positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, dtype: torch.dtype, overlap: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[rows, head_dim]` of `positions` `[rows]` times `frequencies` `[head_dim / 2]`, both times
    `scaling`, as a model's rotary embedding gives them."""
    rows, half = len(positions), len(frequencies)
    cos, sin = positions.new_empty(2, rows, 2 * half, dtype=dtype)
    launch(
        _rotations,
        (rows,),
        cos,
        sin,
        positions,
        frequencies,
        scaling,
        overlap,
        half,
        triton.next_power_of_2(half),
        num_warps=1,
        **launch_options(overlap),
    )
    return cos, sin


def rotate_write(
    qkv: Parts,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    layer: LayerKv,
    query_heads: int,
    norms: HeadNorms | None,
    overlap: bool = False,
) -> torch.Tensor:
    """Gives rotated queries `[rows, query_heads, head_dim]`; writes rotated keys, and values, to `slots` `[rows]` of
    `layer`.

    `qkv`: of `[rows, (query_heads + 2 * kv_heads) * head_dim]`. `cos` and `sin`: `[rows, head_dim]`. With `norms`,
    queries and keys are normalized before.
    """
    kv_heads, head_dim = layer.kv_heads, layer.head_dim
    parts, rows, _ = qkv.sums.shape
    queries = layer.pool.new_empty(rows, query_heads, head_dim, dtype=layer.dtype)
    query_norm, key_norm, epsilon = norms or (None, None, 0.0)
    launch(
        _rotate_write,
        (rows, triton.cdiv(query_heads + 2 * kv_heads, _TILE_HEADS)),
        queries,
        *layer.pool,
        qkv.sums,
        qkv.bias,
        cos,
        sin,
        slots,
        *layer.scales,
        query_norm,
        key_norm,
        epsilon,
        parts,
        overlap,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=layer.page_size,
        tile_heads=_TILE_HEADS,
        dimensions=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
        **launch_options(overlap),
    )
    return queries


def add_norm(
    residual: torch.Tensor, added: Parts | None, weight: torch.Tensor, epsilon: float, overlap: bool = False
) -> torch.Tensor:
    """Adds `added` to `residual` `[rows, hidden]`, in place, and gives the root-mean-square norms of the sums."""
    rows, hidden = residual.shape
    normed = torch.empty_like(residual)
    sums, bias = added or (None, None)
    block = triton.next_power_of_2(hidden)
    launch(
        _add_norm,
        (rows,),
        normed,
        residual,
        sums,
        bias,
        weight,
        epsilon,
        1 if sums is None else len(sums),
        overlap,
        hidden,
        block,
        num_warps=min(_MAX_WARPS, max(1, block // _NUMBERS_OF_A_WARP)),
        **launch_options(overlap),
    )
    return normed


def silu_mul(gate_up: Parts, dtype: torch.dtype, overlap: bool = False) -> torch.Tensor:
    """Of `[rows, 2 * inner]` silu(gate) * up, `[rows, inner]`."""
    parts, rows, width = gate_up.sums.shape
    inner = width // 2
    product = gate_up.sums.new_empty(rows, inner, dtype=dtype)
    launch(
        _silu_mul,
        (rows, triton.cdiv(inner, _GATES)),
        product,
        *gate_up,
        parts,
        overlap,
        inner,
        _GATES,
        num_warps=4,
        **launch_options(overlap),
    )
    return product
