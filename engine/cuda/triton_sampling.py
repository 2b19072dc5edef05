"""The choice of tokens on a GPU without a host that waits: Triton kernels which give the tokens of
engine/sampling/sampler.py.

The vocabulary is cut in chunks. Tokens are decided by the exact operations of engine/sampling/noise.py and
engine/sampling/ieee_math.py; exponentials of the device decide only which chunks are looked at closely.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engine.passes.device import current, on_device
from engine.sampling.logits_scan import RACE_MARGIN, Draw, LogitsScan
from engine.sampling.noise import GOLDEN, MULTIPLIER_1, MULTIPLIER_2

CHUNK = 1024
_GOLDEN = tl.constexpr(GOLDEN)
_MULTIPLIER_1 = tl.constexpr(MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(MULTIPLIER_2)
_MARGIN = tl.constexpr(RACE_MARGIN)
_LN2 = tl.constexpr(math.log(2))
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_INF = tl.constexpr(math.inf)


@triton.jit
def _noise(draws, row, token_ids, column, exists):  # type: ignore[no-untyped-def]
    """As `noise_bits`, the top 32 bits."""
    # Triton takes no annotation of a parameter but tl.constexpr.
    token = column.to(tl.uint64)
    if token_ids is not None:
        token = tl.load(token_ids + column, mask=exists, other=0).to(tl.uint64)
    bits = (token + 1) * _GOLDEN + tl.load(draws + row).to(tl.uint64)
    bits = (bits ^ (bits >> 30)) * _MULTIPLIER_1
    bits = (bits ^ (bits >> 27)) * _MULTIPLIER_2
    return (bits >> 32).to(tl.uint32)


@triton.jit
def _temperature(draws, row, rows):  # type: ignore[no-untyped-def]
    return tl.load(draws + rows + row).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _log(x):  # type: ignore[no-untyped-def]
    """As `ieee_math.log`, operation by operation."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1022
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    # A number that is compared, not calculated with, would be rounded to float32.
    low = mantissa < tl.full(mantissa.shape, _SQRT_HALF, tl.float64)
    mantissa = tl.where(low, mantissa + mantissa, mantissa)
    scale = (exponent - low.to(tl.int64)).to(tl.float64)
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = tl.full(square.shape, 1 / 21, tl.float64)
    for k in tl.static_range(9, -1, -1):
        series = series * square + 1 / (2 * k + 1)
    return scale * _LN2 + (s + s) * series


@triton.jit
def _scores(logits, row, row_stride, column, exists):  # type: ignore[no-untyped-def]
    """NaN counts as infinity: a row that holds either has no token."""
    score = tl.load(logits + row.to(tl.int64) * row_stride + column, mask=exists, other=-_INF).to(tl.float32)
    return tl.where(score == score, score, _INF)


@triton.jit(do_not_specialize=["rows"])
def _scan(  # type: ignore[no-untyped-def]
    largest, best, arrivals, columns, logits, draws, token_ids, row_stride, size, rows, chunk_size: tl.constexpr
):
    """One chunk of a row: its largest score, the first column of it, the first arrival."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    place = row * tl.num_programs(0) + chunk
    column = chunk * chunk_size + tl.arange(0, chunk_size)
    exists = column < size
    score = _scores(logits, row, row_stride, column, exists)
    top = tl.max(score, 0)
    base = tl.where(top == -_INF, 0.0, top)
    tl.store(largest + place, top)
    tl.store(best + place, top)
    tl.store(columns + place, tl.min(tl.where(score == top, column, size), 0))
    if draws is not None:
        temperature = _temperature(draws, row, rows)
        if temperature > 0:
            noise = _noise(draws, row, token_ids, column, exists).to(tl.float32) + 0.5
            tl.store(arrivals + place, tl.min(noise * tl.exp((base - score) / temperature), 0))


@triton.jit(do_not_specialize=["rows"])
def _score(  # type: ignore[no-untyped-def]
    largest,
    best,
    arrivals,
    columns,
    logits,
    draws,
    token_ids,
    row_stride,
    size,
    rows,
    chunk_size: tl.constexpr,
    chunks: tl.constexpr,
):
    """One chunk of a row that is drawn: its best token, unless no token of the chunk can be the row's. As
    `_front_runners` and `_winners` of the sampler. `chunks` is padded."""
    chunk, row, count = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    temperature = _temperature(draws, row, rows)
    if temperature > 0:
        place = row * count + tl.arange(0, chunks)
        exists = tl.arange(0, chunks) < count
        tops = tl.load(largest + place, mask=exists, other=-_INF)
        top = tl.max(tops, 0)
        first = tl.load(arrivals + place, mask=exists, other=_INF) * tl.exp((top - tops) / temperature)
        own = row * count + chunk
        own_first = tl.load(arrivals + own) * tl.exp((top - tl.load(largest + own)) / temperature)
        if own_first <= tl.min(first, 0) * _MARGIN:
            column = chunk * chunk_size + tl.arange(0, chunk_size)
            in_row = column < size
            deficit = tl.div_rn(top - _scores(logits, row, row_stride, column, in_row), temperature)
            half_up = _noise(draws, row, token_ids, column, in_row).to(tl.float64) + 0.5
            gumbel = -_log(-_log(1.0 - half_up * (1 / 4294967296)))
            score = tl.where(in_row, gumbel.to(tl.float32) - deficit, -_INF)
            won = tl.max(score, 0)
            tl.store(best + own, won)
            tl.store(columns + own, tl.min(tl.where((score == won) & in_row, column, size), 0))
        else:
            tl.store(best + own, -_INF)


@triton.jit(do_not_specialize=["count"])
def _choose(  # type: ignore[no-untyped-def]
    tokens, largest, best, columns, token_ids, size, count, chunks: tl.constexpr
):
    """One row, of `count` chunks; `chunks` is padded."""
    row = tl.program_id(0)
    place = row * count + tl.arange(0, chunks)
    exists = tl.arange(0, chunks) < count
    tops = tl.load(largest + place, mask=exists, other=-_INF)
    top = tl.max(tops, 0)
    scores = tl.load(best + place, mask=exists, other=-_INF)
    won = (scores == tl.max(scores, 0)) & exists
    # A row without a token may have no best column either.
    column = tl.minimum(tl.min(tl.where(won, tl.load(columns + place, mask=exists, other=0), size), 0), size - 1)
    token = column.to(tl.int64)
    if token_ids is not None:
        token = tl.load(token_ids + column)
    tl.store(tokens + row, tl.where(tl.abs(top) < _INF, token, -1))


class TritonScan(LogitsScan):
    draws = True

    def choose(
        self, scores: torch.Tensor, draws: Sequence[Draw], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        (rows, size), device = scores.shape, scores.device
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        stride, count = scores.stride(0), triton.cdiv(size, CHUNK)
        chunks = triton.next_power_of_2(count)
        # Triton compiles another kernel for a tensor that does not begin at a multiple of 16 bytes.
        numbers = -(-rows * count // 4) * 4
        largest, best, arrivals = torch.empty(3, numbers, dtype=torch.float32, device=device)
        columns = torch.empty(rows, count, dtype=torch.int32, device=device)
        tokens = torch.empty(rows, dtype=torch.int64, device=device)
        keys, temperatures = zip(*draws, strict=True)
        drawn = None
        if any(temperatures):
            # The bits of temperatures, so that one tensor holds both.
            drawn = on_device([*keys, *array("i", array("f", temperatures).tobytes())], device)
        given = (scores, drawn, token_ids, stride, size, rows)
        with current(device):
            _scan[(count, rows)](largest, best, arrivals, columns, *given, CHUNK)
            if drawn is not None:
                # A multiplication and an addition in one operation give other bits than both.
                _score[(count, rows)](largest, best, arrivals, columns, *given, CHUNK, chunks, enable_fp_fusion=False)
            _choose[(rows,)](tokens, largest, best, columns, token_ids, size, count, chunks)
        return tokens

    def draw(
        self, scores: torch.Tensor, draws: Sequence[Draw], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        return self.choose(scores, draws, token_ids)
