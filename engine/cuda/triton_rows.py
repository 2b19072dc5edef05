"""What a GPU does to each row between the linear layers of a decoder layer, but for attention: Triton kernels.

All compute in float32 and round once. A row's sums are those of one program, in tiles whose size the model alone
decides, so that they have one order by construction. Tensors are contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Heads that a program rotates. Few, so that one row alone keeps more than one multiprocessor busy.
_TILE_HEADS = 4
# Numbers of a product of gates that a program computes.
_GATES = 1024
# Numbers of a row for each warp that normalizes it, and the most warps.
_NUMBERS_OF_A_WARP = 256
_MAX_WARPS = 16

HeadNorms = tuple[torch.Tensor, torch.Tensor, float]
"""Weights of the norms of a query head and of a key head, and their epsilon."""


@triton.jit
def _rotate_write(  # type: ignore[no-untyped-def]
    # Triton takes no annotation of a parameter but tl.constexpr.
    queries,
    keys,
    values,
    qkv,
    cos,
    sin,
    slots,
    query_norm,
    key_norm,
    epsilon,
    query_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    tile_heads: tl.constexpr,
    dimensions: tl.constexpr,
):
    """Some heads of one row. `dimensions` is half a head's, padded."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)
    dimension = tl.arange(0, dimensions)
    half: tl.constexpr = head_dim // 2
    in_half = dimension < half
    is_query = (head < query_heads)[:, None]
    is_value = (head >= query_heads + kv_heads)[:, None]
    is_real = (head < query_heads + 2 * kv_heads)[:, None] & in_half[None, :]
    places = (row * (query_heads + 2 * kv_heads) + head)[:, None] * head_dim + dimension[None, :]
    given_first = tl.load(qkv + places, mask=is_real, other=0.0)
    given_second = tl.load(qkv + places + half, mask=is_real, other=0.0)
    first, second = given_first.to(tl.float32), given_second.to(tl.float32)
    if query_norm is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / head_dim + epsilon)[:, None]
        of_query = tl.load(query_norm + dimension, mask=in_half, other=0.0).to(tl.float32)[None, :]
        of_key = tl.load(key_norm + dimension, mask=in_half, other=0.0).to(tl.float32)[None, :]
        first = first * scale * tl.where(is_query, of_query, of_key)
        of_query = tl.load(query_norm + half + dimension, mask=in_half, other=0.0).to(tl.float32)[None, :]
        of_key = tl.load(key_norm + half + dimension, mask=in_half, other=0.0).to(tl.float32)[None, :]
        second = second * scale * tl.where(is_query, of_query, of_key)
    angles = row * head_dim + dimension
    first_cos = tl.load(cos + angles, mask=in_half, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + angles, mask=in_half, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + angles + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + angles + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    rotated_first = (first * first_cos - second * first_sin).to(qkv.dtype.element_ty)
    rotated_second = (second * second_cos + first * second_sin).to(qkv.dtype.element_ty)
    query_places = (row * query_heads + head)[:, None] * head_dim + dimension[None, :]
    tl.store(queries + query_places, rotated_first, mask=is_real & is_query)
    tl.store(queries + query_places + half, rotated_second, mask=is_real & is_query)
    slot = tl.load(slots + row)
    kv_head = slot // page_size * kv_heads + (head - query_heads) % kv_heads
    kv_places = (kv_head * page_size + slot % page_size)[:, None] * head_dim + dimension[None, :]
    is_key = is_real & (head >= query_heads)[:, None] & (head < query_heads + kv_heads)[:, None]
    tl.store(keys + kv_places, rotated_first, mask=is_key)
    tl.store(keys + kv_places + half, rotated_second, mask=is_key)
    tl.store(values + kv_places, given_first, mask=is_real & is_value)
    tl.store(values + kv_places + half, given_second, mask=is_real & is_value)


@triton.jit
def _add_norm(to, residual, added, weight, epsilon, hidden: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row. `block` is `hidden`, padded."""
    place = tl.arange(0, block)
    places = tl.program_id(0).to(tl.int64) * hidden + place
    is_real = place < hidden
    factors = tl.load(weight + place, mask=is_real, other=0.0).to(tl.float32)
    row = tl.load(residual + places, mask=is_real, other=0.0).to(tl.float32)
    if added is not None:
        row += tl.load(added + places, mask=is_real, other=0.0).to(tl.float32)
        rounded = row.to(residual.dtype.element_ty)
        tl.store(residual + places, rounded, mask=is_real)
        row = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / hidden + epsilon)
    tl.store(to + places, (row * scale * factors).to(to.dtype.element_ty), mask=is_real)


@triton.jit
def _silu_mul(to, gate_up, inner: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """`block` numbers of one row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    is_real = place < inner
    gate = tl.load(gate_up + row * (2 * inner) + place, mask=is_real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * inner) + inner + place, mask=is_real, other=0.0).to(tl.float32)
    product = gate / (1 + tl.exp(-gate)) * up
    tl.store(to + row * inner + place, product.to(to.dtype.element_ty), mask=is_real)


def rotation_constants(query_heads: int, kv_heads: int, head_dim: int, page_size: int) -> dict[str, int]:
    """What `rotate_write` is compiled with; it runs on one warp."""
    return {
        "query_heads": query_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "page_size": page_size,
        "tile_heads": _TILE_HEADS,
        "dimensions": triton.next_power_of_2(head_dim // 2),
    }


def norm_constants(hidden: int) -> dict[str, int]:
    """What `add_norm` is compiled with."""
    return {"hidden": hidden, "block": triton.next_power_of_2(hidden)}


def norm_warps(hidden: int) -> int:
    return min(_MAX_WARPS, max(1, triton.next_power_of_2(hidden) // _NUMBERS_OF_A_WARP))


def gate_constants(inner: int) -> dict[str, int]:
    """What `silu_mul` is compiled with."""
    return {"inner": inner, "block": _GATES}


def rotate_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    query_heads: int,
    norms: HeadNorms | None,
) -> torch.Tensor:
    """Gives rotated queries `[rows, query_heads, head_dim]`; writes rotated keys, and values, to `slots` `[rows]` of
    `pool`, that of a `LayerKv`.

    `qkv`: `[rows, (query_heads + 2 * kv_heads) * head_dim]`. `cos` and `sin`: `[rows, head_dim]`, as a model's rotary
    embedding gives them. With `norms`, queries and keys are normalized before.
    """
    _, _, kv_heads, page_size, head_dim = pool.shape
    queries = qkv.new_empty(len(qkv), query_heads, head_dim)
    keys, values = pool
    query_norm, key_norm, epsilon = norms or (None, None, 0.0)
    _rotate_write[(len(qkv), triton.cdiv(query_heads + 2 * kv_heads, _TILE_HEADS))](
        queries,
        keys,
        values,
        qkv,
        cos,
        sin,
        slots,
        query_norm,
        key_norm,
        epsilon,
        **rotation_constants(query_heads, kv_heads, head_dim, page_size),
        num_warps=1,
    )
    return queries


def add_norm(residual: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Adds `added` to `residual` `[rows, hidden]`, in place, and gives the root-mean-square norms of the sums."""
    hidden = residual.shape[1]
    normed = torch.empty_like(residual)
    _add_norm[(len(residual),)](
        normed, residual, added, weight, epsilon, **norm_constants(hidden), num_warps=norm_warps(hidden)
    )
    return normed


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[rows, 2 * inner]` to silu(gate) * up, `[rows, inner]`."""
    rows, inner = len(gate_up), gate_up.shape[1] // 2
    product = gate_up.new_empty(rows, inner)
    _silu_mul[(rows, triton.cdiv(inner, _GATES))](product, gate_up, **gate_constants(inner), num_warps=4)
    return product
