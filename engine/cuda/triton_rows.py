"""What a GPU does to each row between the linear layers of a decoder layer, but for attention: Triton kernels, which do
what the layer's description says (engine/layers/description.py).

All compute in float32 and round once. A row's sums are those of one program, in tiles whose size the model alone
decides, so that they have one order by construction. Tensors are contiguous. Products come in `Parts`, which add up to
the bits of the whole product. With `overlap`, only where kernels can (engine/cuda/triton_product.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from spool.engine.cuda.launches import launch
from spool.engine.cuda.triton_product import Parts, add_parts, launch_options, wait_for_turn
from spool.engine.kv.kv_store import SCALE_BYTES
from spool.engine.kv.paged_kv import LayerKv
from spool.engine.layers.description import Activation, HeadNorms, Norm, Rotation

# Heads that a program rotates, unless all are normalized as one row. Few, so that one row alone keeps more than one
# multiprocessor busy.
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
_SILU = tl.constexpr(Activation.SILU.value)
_GELU = tl.constexpr(Activation.GELU.value)
_GELU_TANH = tl.constexpr(Activation.GELU_TANH.value)
_RELU = tl.constexpr(Activation.RELU.value)


class Added(NamedTuple):
    """What is to be added to a residual: the norm of a product, times `multiplier`."""

    product: Parts
    post_norm: Norm | None = None
    multiplier: float = 1.0


class NormOfHeads(NamedTuple):
    """The norms of queries and keys as one, with weights float32 `[(query_heads + kv_heads) * head_dim]`."""

    norm: Norm
    whole: bool
    after_rotation: bool

    @classmethod
    def of(cls, norms: HeadNorms) -> NormOfHeads:
        queries, keys = norms.queries, norms.keys
        assert (queries.epsilon, queries.centred) == (keys.epsilon, keys.centred), "queries and keys differ in norms"
        assert not (norms.whole and norms.after_rotation), "whole queries are normalized before their rotation"
        biases = [norm.bias for norm in (queries, keys) if norm.bias is not None]
        bias = torch.cat(biases) if biases else None
        joined = Norm(torch.cat((queries.weight, keys.weight)), queries.epsilon, bias, queries.centred)
        return cls(joined, norms.whole, norms.after_rotation)


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
def _mean_of_heads(  # type: ignore[no-untyped-def]
    sums, head, query_heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, whole: tl.constexpr
):
    """Of the sum of each head; if `whole`, of all queries, or of all keys."""
    if whole:
        is_query, is_key = head < query_heads, (head >= query_heads) & (head < query_heads + kv_heads)
        of_queries = tl.sum(tl.where(is_query, sums, 0.0), 0) / query_heads
        sums = tl.where(is_query, of_queries, tl.sum(tl.where(is_key, sums, 0.0), 0) / kv_heads)
    return sums / head_dim


@triton.jit
def _normalized_heads(  # type: ignore[no-untyped-def]
    first,
    second,
    weights,
    shifts,
    epsilon,
    head,
    in_half,
    query_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    whole: tl.constexpr,
    centred: tl.constexpr,
):
    """Of heads in two halves. Weights and biases, which may be None, are pairs, too."""
    if centred:
        sums = tl.sum(first, 1) + tl.sum(second, 1)
        mean = _mean_of_heads(sums, head, query_heads, kv_heads, head_dim, whole)[:, None]
        first, second = tl.where(in_half[None, :], first - mean, 0.0), tl.where(in_half[None, :], second - mean, 0.0)
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = tl.rsqrt(_mean_of_heads(squares, head, query_heads, kv_heads, head_dim, whole) + epsilon)[:, None]
    first, second = first * scale * weights[0], second * scale * weights[1]
    if shifts is not None:
        first, second = first + shifts[0], second + shifts[1]
    return first, second


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
    norm,
    norm_bias,
    epsilon,
    centred: tl.constexpr,
    whole: tl.constexpr,
    after_rotation: tl.constexpr,
    parts: tl.constexpr,
    overlap: tl.constexpr,
    query_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    tile_heads: tl.constexpr,
    dimensions: tl.constexpr,
):
    """Some heads of one row; all, if `whole` queries and keys are normalized. `dimensions` is half a head's, padded.
    With scales, keys and values are written as codes of 8 bits."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)
    dimension = tl.arange(0, dimensions)
    half: tl.constexpr = head_dim // 2
    in_half = dimension < half
    is_query = (head < query_heads)[:, None]
    is_value = (head >= query_heads + kv_heads)[:, None]
    is_real = (head < query_heads + 2 * kv_heads)[:, None] & in_half[None, :]
    of_bias = head[:, None] * head_dim + dimension[None, :]
    # Reads are asked for before any is needed, weights before it is this kernel's turn; and for all heads, also those
    # that are the same for each, so that no thread waits for what another one has read.
    shifts = None
    if norm is not None:
        is_normed = is_real & ~is_value
        first_weights = tl.load(norm + of_bias, mask=is_normed, other=0.0)
        weights = first_weights, tl.load(norm + of_bias + half, mask=is_normed, other=0.0)
        if norm_bias is not None:
            first_shifts = tl.load(norm_bias + of_bias, mask=is_normed, other=0.0)
            shifts = first_shifts, tl.load(norm_bias + of_bias + half, mask=is_normed, other=0.0)
    wait_for_turn(overlap)
    slot = tl.load(slots + row)
    angles = row * half + tl.zeros([tile_heads, 1], tl.int32) + dimension[None, :]
    if not whole:
        cosines = tl.load(cos + angles, mask=is_real, other=0.0).to(tl.float32)
        sines = tl.load(sin + angles, mask=is_real, other=0.0).to(tl.float32)
    width: tl.constexpr = (query_heads + 2 * kv_heads) * head_dim
    count = tl.num_programs(0).to(tl.int64) * width
    places = row * width + of_bias
    dtype: tl.constexpr = queries.dtype.element_ty
    given_first = add_parts(qkv, bias, places, of_bias, is_real, count, parts, dtype)
    given_second = add_parts(qkv, bias, places + half, of_bias + half, is_real, count, parts, dtype)
    first, second = given_first.to(tl.float32), given_second.to(tl.float32)
    if norm is not None and not after_rotation:
        first, second = _normalized_heads(
            first, second, weights, shifts, epsilon, head, in_half, query_heads, kv_heads, head_dim, whole, centred
        )
    if whole:
        # Later, as the numbers of a whole row fill the registers.
        cosines = tl.load(cos + angles, mask=is_real, other=0.0).to(tl.float32)
        sines = tl.load(sin + angles, mask=is_real, other=0.0).to(tl.float32)
    first, second = first * cosines - second * sines, second * cosines + first * sines
    if norm is not None and after_rotation:
        first, second = _normalized_heads(
            first, second, weights, shifts, epsilon, head, in_half, query_heads, kv_heads, head_dim, whole, centred
        )
    rotated_first, rotated_second = first.to(dtype), second.to(dtype)
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
    cos, sin, positions, frequencies, scalings, overlap: tl.constexpr, half: tl.constexpr, dimensions: tl.constexpr
):
    """One row. `dimensions` is `half`, padded."""
    row = tl.program_id(0).to(tl.int64)
    dimension = tl.arange(0, dimensions)
    in_half = dimension < half
    frequency = tl.load(frequencies + dimension, mask=in_half, other=0.0)
    scaling = tl.load(scalings + dimension, mask=in_half, other=0.0)
    wait_for_turn(overlap)
    angles = frequency * tl.load(positions + row).to(tl.float32)
    dtype: tl.constexpr = cos.dtype.element_ty
    tl.store(cos + row * half + dimension, (tl.cos(angles) * scaling).to(dtype), mask=in_half)
    tl.store(sin + row * half + dimension, (tl.sin(angles) * scaling).to(dtype), mask=in_half)


@triton.jit
def _normalized(row, is_real, weights, bias, epsilon, hidden: tl.constexpr, centred: tl.constexpr):  # type: ignore[no-untyped-def]
    if centred:
        row = tl.where(is_real, row - tl.sum(row, 0) / hidden, 0.0)
    row = row * tl.rsqrt(tl.sum(row * row, 0) / hidden + epsilon) * weights
    if bias is not None:
        row += bias
    return row


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    to,
    residual,
    added,
    bias,
    multiplier,
    post_weight,
    post_bias,
    post_epsilon,
    post_centred: tl.constexpr,
    weight,
    norm_bias,
    epsilon,
    centred: tl.constexpr,
    of_residual: tl.constexpr,
    parts: tl.constexpr,
    overlap: tl.constexpr,
    hidden: tl.constexpr,
    block: tl.constexpr,
):
    """One row. `block` is `hidden`, padded. The norm is of the sum, or `of_residual`, as it was."""
    place = tl.arange(0, block)
    places = tl.program_id(0).to(tl.int64) * hidden + place
    is_real = place < hidden
    weights, shifts, post_shifts = None, None, None
    if weight is not None:
        weights = tl.load(weight + place, mask=is_real, other=0.0)
        if norm_bias is not None:
            shifts = tl.load(norm_bias + place, mask=is_real, other=0.0)
    if post_weight is not None:
        post_weights = tl.load(post_weight + place, mask=is_real, other=0.0)
        if post_bias is not None:
            post_shifts = tl.load(post_bias + place, mask=is_real, other=0.0)
    wait_for_turn(overlap)
    row = tl.load(residual + places, mask=is_real, other=0.0).to(tl.float32)
    normed = row
    if added is not None:
        dtype: tl.constexpr = residual.dtype.element_ty
        count = tl.num_programs(0).to(tl.int64) * hidden
        more = add_parts(added, bias, places, place, is_real, count, parts, dtype).to(tl.float32)
        if post_weight is not None:
            more = _normalized(more, is_real, post_weights, post_shifts, post_epsilon, hidden, post_centred)
        if multiplier is not None:
            more *= multiplier
        rounded = (row + more).to(dtype)
        tl.store(residual + places, rounded, mask=is_real)
        if not of_residual:
            normed = rounded.to(tl.float32)
    if weight is not None:
        normed = _normalized(normed, is_real, weights, shifts, epsilon, hidden, centred)
        tl.store(to + places, normed.to(to.dtype.element_ty), mask=is_real)


@triton.jit
def _activated(x, activation: tl.constexpr):  # type: ignore[no-untyped-def]
    if activation == _SILU:
        x = x / (1 + tl.exp(-x))
    elif activation == _GELU:
        x = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    elif activation == _GELU_TANH:
        # 1 + tanh(y) is twice the sigmoid of 2 y.
        x = x / (1 + tl.exp(-x * (1.59576912160573 + 0.0713548162726 * x * x)))
    else:
        x = tl.where(x < 0, 0.0, x)
        if activation != _RELU:
            x = x * x
    return x


@triton.jit
def _activate(  # type: ignore[no-untyped-def]
    to,
    up,
    bias,
    activation: tl.constexpr,
    gated: tl.constexpr,
    parts: tl.constexpr,
    overlap: tl.constexpr,
    inner: tl.constexpr,
    block: tl.constexpr,
):
    """`block` numbers of one row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    is_real = place < inner
    wait_for_turn(overlap)
    dtype: tl.constexpr = to.dtype.element_ty
    width: tl.constexpr = 2 * inner if gated else inner
    count = tl.num_programs(0).to(tl.int64) * width
    places = row * width + place
    product = add_parts(up, bias, places, place, is_real, count, parts, dtype).to(tl.float32)
    product = _activated(product, activation)
    if gated:
        fellow = add_parts(up, bias, places + inner, place + inner, is_real, count, parts, dtype).to(tl.float32)
        product = product * fellow
    tl.store(to + row * inner + place, product.to(dtype), mask=is_real)


def rotations(positions: torch.Tensor, rotation: Rotation, overlap: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of `rotation`, `[rows, head_dim / 2]`, at `positions` `[rows]`."""
    rows, half = len(positions), len(rotation.frequencies)
    cos, sin = positions.new_empty(2, rows, half, dtype=rotation.dtype)
    launch(
        _rotations,
        (rows,),
        cos,
        sin,
        positions,
        rotation.frequencies,
        rotation.scalings,
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
    norm: NormOfHeads | None,
    overlap: bool = False,
) -> torch.Tensor:
    """Gives rotated queries `[rows, query_heads, head_dim]`; writes rotated keys, and values, to `slots` `[rows]` of
    `layer`.

    `qkv`: of `[rows, (query_heads + 2 * kv_heads) * head_dim]`. `cos` and `sin`: `[rows, head_dim / 2]`. With `norm`,
    queries and keys are normalized.
    """
    kv_heads, head_dim = layer.kv_heads, layer.head_dim
    parts, rows, _ = qkv.sums.shape
    queries = layer.pool.new_empty(rows, query_heads, head_dim, dtype=layer.dtype)
    heads, dimensions, whole = query_heads + 2 * kv_heads, triton.next_power_of_2(head_dim // 2), False
    if norm is not None:
        whole = norm.whole
    tile_heads = triton.next_power_of_2(heads) if whole else _TILE_HEADS
    launch(
        _rotate_write,
        (rows, triton.cdiv(heads, tile_heads)),
        queries,
        *layer.pool,
        qkv.sums,
        qkv.bias,
        cos,
        sin,
        slots,
        *layer.scales,
        *_arguments(None if norm is None else norm.norm),
        whole,
        norm is not None and norm.after_rotation,
        parts,
        overlap,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=layer.page_size,
        tile_heads=tile_heads,
        dimensions=dimensions,
        num_warps=_warps(2 * tile_heads * dimensions) if whole else 1,
        **launch_options(overlap),
    )
    return queries


def add_norm(
    residual: torch.Tensor,
    added: Added | None,
    norm: Norm | None,
    overlap: bool = False,
    of_residual: bool = False,
) -> torch.Tensor:
    """Adds `added` to `residual` `[rows, hidden]`, in place, and gives the norms of the sums, or, if `of_residual`, of
    what was there before. Without a norm, it gives `residual`."""
    if added is None and norm is None:
        return residual
    rows, hidden = residual.shape
    normed = None if norm is None else torch.empty_like(residual)
    (sums, bias), post_norm, multiplier = added or ((None, None), None, 1.0)
    block = triton.next_power_of_2(hidden)
    launch(
        _add_norm,
        (rows,),
        normed,
        residual,
        sums,
        bias,
        None if multiplier == 1.0 else multiplier,
        *_arguments(post_norm),
        *_arguments(norm),
        of_residual,
        1 if sums is None else len(sums),
        overlap,
        hidden,
        block,
        num_warps=_warps(block),
        **launch_options(overlap),
    )
    return residual if normed is None else normed


def activate(
    up: Parts, dtype: torch.dtype, activation: Activation, gated: bool = True, overlap: bool = False
) -> torch.Tensor:
    """Of `[rows, inner]` activation(up); if `gated`, of `[rows, 2 * inner]` activation(gate) * up; `[rows, inner]`."""
    parts, rows, width = up.sums.shape
    inner = width // 2 if gated else width
    product = up.sums.new_empty(rows, inner, dtype=dtype)
    launch(
        _activate,
        (rows, triton.cdiv(inner, _GATES)),
        product,
        *up,
        activation.value,
        gated,
        parts,
        overlap,
        inner,
        _GATES,
        num_warps=4,
        **launch_options(overlap),
    )
    return product


def _arguments(norm: Norm | None) -> tuple[torch.Tensor | None, torch.Tensor | None, float, bool]:
    """Of a kernel: weight, bias, epsilon, and whether it is centred."""
    return (None, None, 0.0, False) if norm is None else (norm.weight, norm.bias, norm.epsilon, norm.centred)


def _warps(numbers: int) -> int:
    return min(_MAX_WARPS, max(1, numbers // _NUMBERS_OF_A_WARP))
