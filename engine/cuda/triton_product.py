"""Linear layers on a GPU, by a Triton kernel that gives a row the same bits whatever shares its call.

The products of torch's libraries add up in an order that depends on the number of rows. Here the order of a row's sums
follows from the weight's shape alone: outputs of the weight are the rows of the matrix units' tiles and rows of the
input are the columns, so that tiles for few and for many rows use one instruction, which differs in its number of
columns only. The inner dimension is cut in parts that do not depend on the rows; the sum of each part adds up block by
block, and the parts are added in their order, in float32: by a kernel of their own, or by one that uses the product.

Quantised weights are expanded block by block, in registers: each number is rounded to float32 as torch rounds it, then
once to the type of the inputs. The rest is the same kernel, so that the product has the bits of the expanded weight's.

Kernels that overlap begin while earlier ones still run (programmatic dependent launch, on GPUs since Hopper). Until it
is its turn, such a kernel writes nothing, and reads nothing but weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import nn
from triton.runtime import driver

from spool.engine.cuda.launches import launch
from spool.engine.quantization.layers import QuantizedLinear
from spool.engine.quantization.weights import QuantizedWeight

# Rows that one program computes. What is no power of 2 are two tiles of one program, which reads its weights once.
_ROW_TILES = (16, 32, 64, 96, 128, 160, 192)
# Registers of a thread that may hold sums, of 255.
_SUM_REGISTERS = 128
# Of the shared memory that a program can have, bytes that blocks on their way leave to what else it keeps there.
_KEPT_BYTES = 3 << 10
_FEWEST_STAGES = 3
# Programs that keep the memory of an H200 busy: each has 32 KiB of weights on their way, and 4.8 TB/s for 1 us is
# 150 times as much.
_BUSY_PROGRAMS = 192
# Blocks of a part, at least: the first ones on their way are waited for, and the sums of a part are written.
_PART_BLOCKS = 4
# More rows than these read much of the inputs again for each block of 64 outputs, and more of them than of the weights.
_FEW_ROWS, _NARROW_ROWS = 16, 64
# More rows than this make programs enough without parts, whose sums would take more memory than the weights.
_SPLIT_ROWS = 192
# What the interpreter is said to have.
_INTERPRETED_SHARED_MEMORY = 163 << 10
# Outputs that a program of the second kernel adds up.
_ADDED = 1024


Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""`[rows, in]`, a weight `[out, in]` and a bias to `[rows, out]`."""


class Parts(NamedTuple):
    """A product in the making, or in one part a product."""

    sums: torch.Tensor
    """`[parts, rows, out]`: float32 where there are several, which add up in their order."""
    bias: torch.Tensor | None = None
    """To be added to the sum of several parts."""


@dataclass(frozen=True, slots=True)
class ProductShape:
    """How a product is cut up. Only `block_in` and `splits` decide about the order of sums."""

    block_out: int
    block_in: int
    splits: int
    """Parts of the inner dimension."""
    stages: int
    """Blocks in shared memory, at most: one in use, the others on their way."""
    warps: int
    joined: bool = False
    """Each program computes all parts of its outputs, instead of one."""


def product_shape(out_features: int, in_features: int, rows: int = 1) -> ProductShape:
    """`block_in` and `splits` do not depend on `rows`."""
    block_in = 64
    blocks = -(-in_features // block_in)
    splits = 1
    while -(-out_features // 64) * splits < _BUSY_PROGRAMS and blocks >= 2 * splits * _PART_BLOCKS:
        splits *= 2
    if rows <= _FEW_ROWS or (rows <= _NARROW_ROWS and splits > 1):
        return ProductShape(64, block_in, splits, stages=5, warps=4)
    if rows <= _NARROW_ROWS:
        return ProductShape(128, block_in, splits, stages=4, warps=4)
    return ProductShape(128, block_in, splits, stages=5, warps=8, joined=rows > _SPLIT_ROWS)


def _row_tile(rows: int, shape: ProductShape, shared_memory: int) -> int:
    """Rows of a tile: the fewest tiles that registers and shared memory allow, then the smallest."""
    sums = 2 if shape.joined and shape.splits > 1 else 1
    allowed = [
        tile
        for tile in _ROW_TILES
        if tile * shape.block_out * sums <= _SUM_REGISTERS * 32 * shape.warps
        and _fitting_stages(tile, shape, shared_memory) >= _FEWEST_STAGES
    ]
    each = -(-rows // -(-rows // allowed[-1]))
    return next(tile for tile in allowed if tile >= each)


def _fitting_stages(tile: int, shape: ProductShape, shared_memory: int) -> int:
    return min(shape.stages, (shared_memory - _KEPT_BYTES) // ((shape.block_out + tile) * shape.block_in * 2))


def shared_memory_of(device: torch.device) -> int:
    """Bytes of shared memory that a program can have there, from 99 KiB (L4, L40S, RTX) to 227 KiB (H100): those beyond
    which Triton refuses a kernel."""
    if device.type != "cuda":
        return _INTERPRETED_SHARED_MEMORY
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def overlaps(device: torch.device) -> bool:
    """Whether kernels can overlap there."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def loads_words(device: torch.device) -> bool:
    """Whether codes are loaded as words of 32 bits there. Where instructions of the matrix units are those of warps,
    Triton would give them what comes of smaller loads in another order of the inner dimension."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in (9, 10)


def launch_options(overlap: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if overlap else {}


@triton.jit
def wait_for_turn(overlap: tl.constexpr):  # type: ignore[no-untyped-def]
    """Lets the next kernel begin, and waits until all earlier ones have written what they write."""
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def add_parts(sums, bias, places, of_bias, is_real, count, parts: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers at `places` of a product of which `Parts` are given, each of `count` numbers."""
    if parts == 1:
        return tl.load(sums + places, mask=is_real, other=0.0)
    total = tl.load(sums + places, mask=is_real, other=0.0)
    for part in tl.static_range(1, parts):
        total += tl.load(sums + part * count + places, mask=is_real, other=0.0)
    if bias is not None:
        total += tl.load(bias + of_bias, mask=is_real, other=0.0).to(tl.float32)
    return total.to(dtype)


@triton.jit
def _block_of(rows_of_it, row, count, inner, in_features, even_in: tl.constexpr):  # type: ignore[no-untyped-def]
    """`[inner, rows]` of a matrix `[rows, in_features]`: 0 where there is none."""
    exists = (row < count)[None, :]
    if not even_in:
        exists = exists & (inner < in_features)[:, None]
    return tl.load(rows_of_it[None, :] + inner[:, None], mask=exists, other=0.0)


@triton.jit
def _dequantized(  # type: ignore[no-untyped-def]
    codes,
    scales,
    minimums,
    out,
    step,
    out_features,
    groups,
    bits: tl.constexpr,
    group: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    dtype: tl.constexpr,
):
    """`[block_out, block_in]` of a quantised weight: 0 where there is none."""
    width: tl.constexpr = codes.dtype.element_ty.primitive_bitwidth // bits
    of_group = step * (block_in // group) + tl.arange(0, block_in // group)
    place = step * (block_in // width) + tl.arange(0, block_in // width)
    first = out.to(tl.int64)[:, None] * groups
    exists = (out < out_features)[:, None]
    has_group = exists & (of_group < groups)[None, :]
    has_codes = exists & (place < groups * (group // width))[None, :]
    code = tl.load(codes + first * (group // width) + place[None, :], mask=has_codes, other=0)
    scale = tl.load(scales + first + of_group[None, :], mask=has_group, other=0.0)
    minimum = tl.load(minimums + first + of_group[None, :], mask=has_group, other=0.0)
    if width == 2:
        code = tl.interleave(code & 15, code >> 4)
    elif width > 2:
        code = (code[:, :, None] >> (tl.arange(0, width) * bits)[None, None, :]) & ((1 << bits) - 1)
    numbers = code.to(tl.float32).reshape(block_out, block_in // group, group)
    return (numbers * scale[:, :, None] + minimum[:, :, None]).reshape(block_out, block_in).to(dtype)


@triton.jit
def _finish(to, sums, bias, row, rows, out, out_features, has_bias: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores sums `[out, rows]` as `[rows, out]`."""
    is_real = (row < rows)[:, None] & (out < out_features)[None, :]
    found = tl.trans(sums)
    if has_bias:
        found += tl.load(bias + out, mask=out < out_features, other=0.0).to(tl.float32)[None, :]
    places = to + row.to(tl.int64)[:, None] * out_features + out[None, :]
    tl.store(places, found.to(to.dtype.element_ty), mask=is_real)


# One kernel for all rows of a tile, also for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["rows"])
def _multiply(  # type: ignore[no-untyped-def]
    # Triton takes no annotation of a parameter but tl.constexpr.
    to,
    inputs,
    weights,
    scales,
    minimums,
    bias,
    rows,
    out_features,
    in_features,
    groups,
    bits: tl.constexpr,
    group: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    main: tl.constexpr,
    rest: tl.constexpr,
    splits: tl.constexpr,
    joined: tl.constexpr,
    has_bias: tl.constexpr,
    even_out: tl.constexpr,
    even_in: tl.constexpr,
    overlap: tl.constexpr,
):
    """One tile of rows, one block of outputs, and one part of the inner dimension (or all, if `joined`).

    Tiles of rows that share weights run side by side, so that one of them finds in the cache what another has read.
    """
    row = tl.program_id(0) * (main + rest) + tl.arange(0, main)
    out = tl.program_id(1) * block_out + tl.arange(0, block_out)
    part = tl.program_id(2)
    input_rows = inputs + row.to(tl.int64) * in_features
    weight_rows = weights + out.to(tl.int64) * in_features
    steps = tl.cdiv(in_features, block_in)
    part_steps = tl.cdiv(steps, splits)
    wait_for_turn(overlap)
    total = tl.zeros([block_out, main], tl.float32)
    if rest:
        rest_row = tl.program_id(0) * (main + rest) + main + tl.arange(0, rest)
        rest_rows = inputs + rest_row.to(tl.int64) * in_features
        rest_total = tl.zeros([block_out, rest], tl.float32)
    for later in range(splits if joined else 1):
        sums = tl.zeros([block_out, main], tl.float32)
        if rest:
            rest_sums = tl.zeros([block_out, rest], tl.float32)
        for step in range((part + later) * part_steps, tl.minimum((part + later + 1) * part_steps, steps)):
            inner = step * block_in + tl.arange(0, block_in)
            if bits < 16:
                weight = _dequantized(
                    weights,
                    scales,
                    minimums,
                    out,
                    step,
                    out_features,
                    groups,
                    bits,
                    group,
                    block_out,
                    block_in,
                    inputs.dtype.element_ty,
                )
            else:
                exists = (inner < in_features)[None, :] if not even_in else (inner >= 0)[None, :]
                if not even_out:
                    exists = exists & (out < out_features)[:, None]
                weight = tl.load(weight_rows[:, None] + inner[None, :], mask=exists, other=0.0)
            sums = tl.dot(weight, _block_of(input_rows, row, rows, inner, in_features, even_in), sums)
            if rest:
                rest_sums = tl.dot(weight, _block_of(rest_rows, rest_row, rows, inner, in_features, even_in), rest_sums)
        total += sums
        if rest:
            rest_total += rest_sums
    # Parts that are no result yet have no bias, and lie one after the other.
    finished = to + part.to(tl.int64) * rows * out_features
    _finish(finished, total, bias, row, rows, out, out_features, has_bias)
    if rest:
        _finish(finished, rest_total, bias, rest_row, rows, out, out_features, has_bias)


@triton.jit
def _add_up(to, sums, bias, count, out_features, parts: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    total = add_parts(sums, bias, place, place % out_features, place < count, count, parts, to.dtype.element_ty)
    tl.store(to + place, total, mask=place < count)


def product_parts(
    inputs: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
    overlap: bool = False,
    words: bool = True,
    shared_memory: int | None = None,
) -> Parts:
    """As `product`, whose bits they add up to. With `overlap`, only where kernels can. `shared_memory`, which no bit
    depends on: bytes that a program can have; None: on the inputs' device."""
    rows, in_features = inputs.shape
    out_features = weight.shape[0]
    shape = product_shape(out_features, in_features, rows)
    in_parts = shape.splits > 1 and not shape.joined
    parts = shape.splits if in_parts else 1
    to = inputs.new_empty(parts, rows, out_features, dtype=torch.float32 if in_parts else inputs.dtype)
    if rows == 0:
        return Parts(to, bias if in_parts else None)
    if shared_memory is None:
        shared_memory = shared_memory_of(inputs.device)
    tile = _row_tile(rows, shape, shared_memory)
    main = 1 << (tile.bit_length() - 1)
    stored, bits, group = (weight, None, None), 16, in_features
    if isinstance(weight, QuantizedWeight):
        codes, bits, group = weight.codes, weight.bits, weight.group
        stored = (codes.view(torch.int32) if words else codes, weight.scales, weight.minimums)
    launch(
        _multiply,
        (triton.cdiv(rows, tile), triton.cdiv(out_features, shape.block_out), parts),
        to,
        inputs.contiguous(),
        *stored,
        bias,
        rows,
        out_features,
        in_features,
        in_features // group,
        bits=bits,
        group=group,
        block_out=shape.block_out,
        block_in=shape.block_in,
        main=main,
        rest=tile - main,
        splits=shape.splits,
        joined=shape.joined,
        has_bias=bias is not None and not in_parts,
        even_out=out_features % shape.block_out == 0,
        even_in=in_features % shape.block_in == 0,
        overlap=overlap,
        num_warps=shape.warps,
        num_stages=_fitting_stages(tile, shape, shared_memory),
        # Quantised weights are to have the bits that torch expands them to.
        enable_fp_fusion=False,
        **launch_options(overlap),
    )
    return Parts(to, bias if in_parts else None)


def product(
    inputs: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
    words: bool = True,
    shared_memory: int | None = None,
) -> torch.Tensor:
    """`inputs` `[rows, in]` times the transpose of `weight` `[out, in]`, both of one type of 16 bits, plus `bias`.

    A quantised weight gives the bits that its numbers give, rounded to that type. `words`: as `loads_words` says;
    `shared_memory` as in `product_parts`.
    """
    sums, rest_of_bias = product_parts(inputs, weight, bias, words=words, shared_memory=shared_memory)
    parts, rows, out_features = sums.shape
    if parts == 1 or rows == 0:
        return sums[0].to(inputs.dtype)
    output = inputs.new_empty(rows, out_features)
    count = output.numel()
    launch(_add_up, (triton.cdiv(count, _ADDED),), output, sums, rest_of_bias, count, out_features, parts, _ADDED)
    return output


class TritonLinear(nn.Module):
    """Computes what `linear` does, from its weight as it lies there."""

    def __init__(self, linear: nn.Linear | QuantizedLinear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.quantized if isinstance(linear, QuantizedLinear) else linear.weight
        self.bias = linear.bias
        device = (linear.codes if isinstance(linear, QuantizedLinear) else linear.weight).device
        self._words = isinstance(linear, QuantizedLinear) and loads_words(device)
        self.shared_memory = shared_memory_of(device)
        self._library: tuple[Multiply, frozenset[int]] | None = None

    def use_library(self, multiply: Multiply, row_counts: frozenset[int]) -> None:
        """Lets `multiply` compute calls of these numbers of rows. To be of the same bits."""
        self._library = multiply, row_counts

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        rows_in = rows.reshape(-1, self.in_features)
        outputs = self._by_library(rows_in)
        if outputs is None:
            outputs = product(rows_in, self.weight, self.bias, self._words, self.shared_memory)
        return outputs.view(*rows.shape[:-1], self.out_features)

    def partial(self, rows: torch.Tensor, overlap: bool = False) -> Parts:
        """What adds up to the outputs for `[rows, in_features]`. With `overlap`, only where kernels can."""
        outputs = self._by_library(rows)
        if outputs is not None:
            return Parts(outputs.unsqueeze(0))
        return product_parts(rows, self.weight, self.bias, overlap, self._words, self.shared_memory)

    def _by_library(self, rows: torch.Tensor) -> torch.Tensor | None:
        if self._library is None or len(rows) not in self._library[1]:
            return None
        return self._library[0](rows, self.weight, self.bias)
