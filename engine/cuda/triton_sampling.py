"""The choice of tokens on a GPU without a host that waits: Triton kernels which give the tokens of
engine/sampling/sampler.py.

The vocabulary is cut in chunks, of which many programs look at a row's. Filters keep the first tokens of a row in the
order of their keys: a key is the bits of a token's deficit, which order like the number, above its column. How many
tokens, or how much of their weight, lies below some levels of deficit says which of them can be kept; those are listed,
and the last key that is kept is found among them by bisection. Counts and weights are whole numbers, whose sums have no
order. Tokens are decided by the exact operations of engine/sampling/noise.py and engine/ieee_math.py;
exponentials of the device decide only which tokens are looked at closely.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from spool.engine.ieee_math import LN2_HIGH, LN2_LOW, LOG2_E, LOWEST_EXPONENT
from spool.engine.models.memory_plan import LISTED_AT_ONCE
from spool.engine.passes.device import current, host_buffer, on_device
from spool.engine.sampling.context import Draw
from spool.engine.sampling.logits_scan import RACE_MARGIN, LogitsScan
from spool.engine.sampling.logits_shaping import WEIGHT_BITS, Change
from spool.engine.sampling.noise import GOLDEN, MULTIPLIER_1, MULTIPLIER_2

if TYPE_CHECKING:
    from spool.engine.sampling.context import SamplingContext

CHUNK = 1024
_GOLDEN = tl.constexpr(GOLDEN)
_MULTIPLIER_1 = tl.constexpr(MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(MULTIPLIER_2)
_MARGIN = tl.constexpr(RACE_MARGIN)
_LN2 = tl.constexpr(math.log(2))
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_INF = tl.constexpr(math.inf)
_LOG2_E, _LN2_HIGH, _LN2_LOW = tl.constexpr(LOG2_E), tl.constexpr(LN2_HIGH), tl.constexpr(LN2_LOW)
_LARGEST_DEFICIT = tl.constexpr(-LOWEST_EXPONENT)
_WEIGHT = tl.constexpr(2.0**WEIGHT_BITS)
# Added to a smaller number and taken away again, it leaves the whole number next to it, the even one of two.
_ROUNDS = tl.constexpr(1.5 * 2.0**23)
# Numbers of a row in `draws`: the key of its noise, the bits of its temperature (float32), top_k, the bits of top_p and
# of the least weight that is kept (float64), and one to have all rows at multiples of 16 bytes.
_FIELDS = tl.constexpr(6)
# Of the column in a key. Weights of more tokens than it can name would not add up exactly.
_COLUMN_BITS, _COLUMN = tl.constexpr(20), tl.constexpr((1 << 20) - 1)
# Deficits 1, 1.25, 1.5, 1.75, 2, 2.5, ..., 224, and a last one that none reaches.
_LEVELS = tl.constexpr(32)
# What all bits of deficits are less than: those of infinity, and one.
_PAST_ALL = tl.constexpr(0x7F800001)
# Keys at a time: when they are measured, and when they are decided by float64 numbers, of which some GPUs compute few.
_MEASURED, _DECIDED = tl.constexpr(1024), tl.constexpr(64)


@triton.jit
def _noise_bits(keys, numbers):  # type: ignore[no-untyped-def]
    """As `noise_bits`."""
    # Triton takes no annotation of a parameter but tl.constexpr.
    bits = (numbers.to(tl.uint64) + 1) * _GOLDEN + keys.to(tl.uint64)
    bits = (bits ^ (bits >> 30)) * _MULTIPLIER_1
    return (bits ^ (bits >> 27)) * _MULTIPLIER_2


@triton.jit
def _noise(draws, row, token_ids, column, exists):  # type: ignore[no-untyped-def]
    """The top 32 bits."""
    token = column.to(tl.uint64)
    if token_ids is not None:
        token = tl.load(token_ids + column, mask=exists, other=0).to(tl.uint64)
    return (_noise_bits(tl.load(draws + row * _FIELDS), token) >> 32).to(tl.uint32)


@triton.jit
def _temperature(draws, row):  # type: ignore[no-untyped-def]
    return tl.load(draws + row * _FIELDS + 1).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _filters(draws, row, size):  # type: ignore[no-untyped-def]
    """top_k, 0 where it excludes nothing; top_p; the least weight that is kept; whether a token can be excluded."""
    top_k = tl.load(draws + row * _FIELDS + 2)
    top_k = tl.where(top_k < size, top_k, 0)
    top_p = tl.load(draws + row * _FIELDS + 3).to(tl.float64, bitcast=True)
    least = tl.load(draws + row * _FIELDS + 4).to(tl.float64, bitcast=True)
    return top_k, top_p, least, (top_k > 0) | (top_p < 1) | (least > 0)


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


@triton.jit
def _deficit_bits(top, score, temperature):  # type: ignore[no-untyped-def]
    """As `deficits`; of -0, those of 0."""
    return tl.div_rn(top - score, temperature).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _weight(bits):  # type: ignore[no-untyped-def]
    """Of deficits with these bits: as `weights`, operation by operation."""
    deficit = bits.to(tl.float32, bitcast=True)
    bounded = -tl.minimum(deficit, _LARGEST_DEFICIT)
    halvings = (bounded * _LOG2_E + _ROUNDS) - _ROUNDS
    rest = bounded - halvings * _LN2_HIGH - halvings * _LN2_LOW
    series = tl.full(rest.shape, 1 / 5040, tl.float32)
    series = series * rest + 1 / 720
    series = series * rest + 1 / 120
    series = series * rest + 1 / 24
    series = series * rest + 1 / 6
    series = series * rest + 1 / 2
    series = series * rest + 1.0
    series = series * rest + 1.0
    power = ((halvings.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    weight = tl.where(deficit > _LARGEST_DEFICIT, 0.0, series * power)
    return (weight * _WEIGHT).to(tl.int64)


@triton.jit
def _level(level):  # type: ignore[no-untyped-def]
    """What bits of deficits below the level are less than."""
    return tl.where(level < _LEVELS - 1, (127 << 23) + (level << 21), _PAST_ALL)


@triton.jit
def _key_bits(key):  # type: ignore[no-untyped-def]
    return (key >> _COLUMN_BITS).to(tl.int32)


@triton.jit
def _measured(listed, count, last, weighted: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of the listed keys are not above the last, or the sum of their weights."""
    total = tl.zeros((_MEASURED,), tl.int64)
    for first in range(0, count, _MEASURED):
        place = first + tl.arange(0, _MEASURED)
        key = tl.load(listed + place, mask=place < count, other=0)
        measured = (place < count) & (key <= last)
        if weighted:
            total += tl.where(measured, _weight(_key_bits(key)), 0)
        else:
            total += measured.to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def _least_key(listed, count, low, high, target, weighted: tl.constexpr):  # type: ignore[no-untyped-def]
    """The least from `low` on with which the target is measured, `high` if none below does."""
    while low < high:
        middle = (low + high) >> 1
        enough = _measured(listed, count, middle, weighted).to(tl.float64) >= target
        low = tl.where(enough, low, middle + 1)
        high = tl.where(enough, middle, high)
    return high


@triton.jit
def _arrivals(deficit, draws, row, token_ids, column, exists):  # type: ignore[no-untyped-def]
    return (_noise(draws, row, token_ids, column, exists).to(tl.float32) + 0.5) * tl.exp(deficit)


@triton.jit
def _kept(listed, count, first, last, least, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the next listed keys, the deficits, the columns, and which of them the filters leave."""
    place = first + tl.arange(0, size)
    key = tl.load(listed + place, mask=place < count, other=0)
    bits = _key_bits(key)
    kept = (place < count) & (key <= last) & (_weight(bits).to(tl.float64) >= least)
    return bits.to(tl.float32, bitcast=True), (key & _COLUMN).to(tl.int32), kept


@triton.jit
def _found(tokens, exists, token_ids, size):  # type: ignore[no-untyped-def]
    """The columns of those of the tokens that have one, by bisection, and which these are."""
    low, high = tl.zeros_like(tokens), tl.zeros_like(tokens) + (size - 1)
    for _ in range(_COLUMN_BITS):
        middle = (low + high) >> 1
        below = tl.load(token_ids + middle, mask=exists, other=0) < tokens
        low, high = tl.where(below, tl.minimum(middle + 1, high), low), tl.where(below, high, middle)
    return low, exists & (tl.load(token_ids + low, mask=exists, other=0) == tokens)


@triton.jit
def _change(scores, words, ends, token_ids, size, kinds: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row of scores, in place: as `change_scores`. Its words of each kind begin where those before end; a word is
    a token above the bits of a number."""
    row = tl.program_id(0)
    scores += row.to(tl.int64) * size
    for kind in tl.static_range(kinds):
        begin, end = tl.load(ends + row * kinds + kind), tl.load(ends + row * kinds + kind + 1)
        for first in range(begin, end, _MEASURED):
            place = first + tl.arange(0, _MEASURED)
            word = tl.load(words + place, mask=place < end, other=0)
            column = word >> 32
            exists = (place < end) & (column >= 0)
            if token_ids is None:
                exists &= column < size
            else:
                column, exists = _found(column, exists, token_ids, size)
            number = word.to(tl.int32).to(tl.float32, bitcast=True)
            score = tl.load(scores + column, mask=exists, other=0.0)
            if kind == 0:
                score = tl.where(score < 0, score * number, tl.div_rn(score, number))
            elif kind == 1:
                score = score - number
            elif kind == 2:
                score = score + number
            elif kind == 3:
                # NaN stays.
                score = tl.where(score > number, number, score)
            else:
                score = number
            tl.store(scores + column, score, mask=exists)
        # Other threads change what these have changed.
        tl.debug_barrier()


@triton.jit
def _forbid(  # type: ignore[no-untyped-def]
    scores, rows, allowed, token_ids, row_stride, size, bytes_of_row, chunk_size: tl.constexpr
):
    chunk, line = tl.program_id(0), tl.program_id(1)
    column = chunk * chunk_size + tl.arange(0, chunk_size)
    exists = column < size
    token = column.to(tl.int64)
    if token_ids is not None:
        token = tl.load(token_ids + column, mask=exists, other=0)
    byte = tl.load(allowed + line.to(tl.int64) * bytes_of_row + (token >> 3), mask=exists, other=255).to(tl.int32)
    forbidden = exists & (((byte >> (token & 7).to(tl.int32)) & 1) == 0)
    scores += tl.load(rows + line) * row_stride
    score = tl.load(scores + column, mask=forbidden, other=0.0).to(tl.float32)
    # NaN stays: its row has no token.
    tl.store(scores + column, tl.where(score == score, -_INF, score), mask=forbidden)


@triton.jit
def _digest(  # type: ignore[no-untyped-def]
    digests, scores, rows, row_stride, size, per_word: tl.constexpr, chunk_size: tl.constexpr
):
    """Some words of a row: adds their part to its digest. As `digests` of the scan."""
    chunk, line = tl.program_id(0), tl.program_id(1)
    place = chunk * chunk_size + tl.arange(0, chunk_size)
    scores += tl.load(rows + line) * row_stride
    bits: tl.constexpr = 64 // per_word
    word = tl.zeros((chunk_size,), tl.int64)
    for part in tl.static_range(per_word):
        at = place * per_word + part
        score = tl.load(scores + at, mask=at < size, other=0).to(tl.int64)
        word |= (score & ((1 << bits) - 1)) << (part * bits)
    mixed = _noise_bits(_noise_bits(word, place), place).to(tl.int64)
    tl.atomic_add(digests + line, tl.sum(tl.where(place * per_word < size, mixed, 0), 0))


@triton.jit
def _scan(  # type: ignore[no-untyped-def]
    largest, columns, arrivals, sums, logits, draws, token_ids, row_stride, size, chunk_size: tl.constexpr
):
    """One chunk of a row: its largest score, the first column of it, and the first arrival of all its tokens. The sums
    of a row begin with 0."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    place = row * tl.num_programs(0) + chunk
    column = chunk * chunk_size + tl.arange(0, chunk_size)
    exists = column < size
    score = _scores(logits, row, row_stride, column, exists)
    top = tl.max(score, 0)
    tl.store(largest + place, top)
    tl.store(columns + place, tl.min(tl.where(score == top, column, size), 0))
    if draws is not None:
        temperature = _temperature(draws, row)
        if temperature > 0:
            base = tl.where(top == -_INF, 0.0, top)
            arrival = _arrivals((base - score) / temperature, draws, row, token_ids, column, exists)
            tl.store(arrivals + place, tl.min(arrival, 0))
    # Triton compiles all of an `and`.
    if sums is not None:  # noqa: SIM102
        if chunk == 0:
            tl.store(sums + row * _LEVELS + tl.arange(0, _LEVELS), tl.zeros((_LEVELS,), tl.int64))


@triton.jit
def _weigh(  # type: ignore[no-untyped-def]
    sums, largest, logits, draws, row_stride, size, chunk_size: tl.constexpr, chunks: tl.constexpr
):
    """One chunk of a row with filters: adds to the row's sums its tokens below each level or, without top_k, their
    weights. `chunks` is padded."""
    chunk, row, count = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    top_k, _, _, filters = _filters(draws, row, size)
    temperature = _temperature(draws, row)
    place = tl.arange(0, chunks)
    top = tl.max(tl.load(largest + row * count + place, mask=place < count, other=-_INF), 0)
    if filters & (temperature > 0) & (tl.abs(top) < _INF):
        column = chunk * chunk_size + tl.arange(0, chunk_size)
        exists = column < size
        bits = _deficit_bits(top, _scores(logits, row, row_stride, column, exists), temperature)
        measure = tl.where(exists, tl.where(top_k > 0, 1, _weight(bits)), 0)
        levels = tl.arange(0, _LEVELS)
        found = tl.zeros((_LEVELS,), tl.int64)
        for level in range(_LEVELS):
            below = tl.sum(tl.where(bits < _level(level), measure, 0), 0)
            found = tl.where(levels == level, below, found)
        tl.atomic_add(sums + row * _LEVELS + levels, found)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    tokens,
    listed,
    largest,
    columns,
    arrivals,
    sums,
    logits,
    draws,
    token_ids,
    row_stride,
    size,
    count,
    chunk_size: tl.constexpr,
    chunks: tl.constexpr,
):
    """One row, of `count` chunks; `chunks` is padded. Drawn as by `_front_runners` and `_winners` of the sampler."""
    row = tl.program_id(0)
    place = row * count + tl.arange(0, chunks)
    exists = tl.arange(0, chunks) < count
    tops = tl.load(largest + place, mask=exists, other=-_INF)
    top = tl.max(tops, 0)
    first_column = tl.load(columns + place, mask=exists, other=0)
    column = tl.min(tl.where((tops == top) & exists, first_column, size), 0)
    if draws is not None:
        temperature = _temperature(draws, row)
        if (temperature > 0) & (tl.abs(top) < _INF):
            listed += row.to(tl.int64) * size
            firsts = tl.load(arrivals + place, mask=exists, other=_INF) * tl.exp((top - tops) / temperature)
            limit = tl.min(firsts, 0) * _MARGIN
            end, low = tl.full((), _PAST_ALL, tl.int32), tl.full((), 0, tl.int32)
            top_k, top_p, least, filters = _filters(draws, row, size)
            total = tl.full((), 0, tl.int64)
            if sums is not None:  # noqa: SIM102
                if filters:
                    levels = tl.arange(0, _LEVELS)
                    found = tl.load(sums + row * _LEVELS + levels)
                    total = tl.max(found, 0)
                    target = tl.where(top_k > 0, top_k.to(tl.float64), total.to(tl.float64) * top_p)
                    # Weights do not fall strictly with deficits, but nearly.
                    weights = _weight(tl.minimum(_level(levels), _PAST_ALL - 1)).to(tl.float64)
                    none_later = (weights * 1.001 < least) & ((top_k == 0) | (top_p >= 1))
                    enough = (found.to(tl.float64) >= target) | none_later
                    level = tl.min(tl.where(enough, levels, _LEVELS - 1), 0)
                    end, low = _level(level), tl.where(level > 0, _level(level - 1), 0)
                    limit = tl.full((), _INF, tl.float32)
            listed_count = 0
            for chunk in range(count):
                own = row * count + chunk
                own_top = tl.load(largest + own)
                own_first = tl.load(arrivals + own) * tl.exp((top - own_top) / temperature)
                if (_deficit_bits(top, own_top, temperature) < end) & (filters | (own_first <= limit)):
                    of_chunk = chunk * chunk_size + tl.arange(0, chunk_size)
                    bits = _deficit_bits(top, _scores(logits, row, row_stride, of_chunk, of_chunk < size), temperature)
                    arrival = _arrivals(
                        bits.to(tl.float32, bitcast=True), draws, row, token_ids, of_chunk, of_chunk < size
                    )
                    taken = (of_chunk < size) & (bits < end) & (arrival <= limit)
                    at = listed_count + tl.cumsum(taken.to(tl.int32), 0) - 1
                    tl.store(listed + at, (bits.to(tl.int64) << _COLUMN_BITS) | of_chunk, mask=taken)
                    listed_count += tl.sum(taken.to(tl.int32), 0)
            # Other threads read what these have written.
            tl.debug_barrier()
            last, first_key = end.to(tl.int64) << _COLUMN_BITS, low.to(tl.int64) << _COLUMN_BITS
            if filters:
                if top_k > 0:
                    last = _least_key(listed, listed_count, first_key, last, top_k.to(tl.float64), False)
                    total = _measured(listed, listed_count, last, True)
                    first_key = first_key * 0
                if top_p < 1:
                    last = _least_key(listed, listed_count, first_key, last, total.to(tl.float64) * top_p, True)
            earliest = tl.full((_MEASURED,), _INF, tl.float32)
            for first in range(0, listed_count, _MEASURED):
                deficit, named, kept = _kept(listed, listed_count, first, last, least, _MEASURED)
                arrival = _arrivals(deficit, draws, row, token_ids, named, kept)
                earliest = tl.minimum(earliest, tl.where(kept, arrival, _INF))
            limit = tl.min(earliest, 0) * _MARGIN
            best = tl.full((_DECIDED,), -_INF, tl.float32)
            best_column = tl.full((_DECIDED,), 0, tl.int32) + size
            for first in range(0, listed_count, _DECIDED):
                deficit, named, kept = _kept(listed, listed_count, first, last, least, _DECIDED)
                kept &= _arrivals(deficit, draws, row, token_ids, named, kept) <= limit
                if tl.max(kept.to(tl.int32), 0) > 0:
                    half_up = _noise(draws, row, token_ids, named, kept).to(tl.float64) + 0.5
                    gumbel = -_log(-_log(1.0 - half_up * (1 / 4294967296)))
                    score = tl.where(kept, gumbel.to(tl.float32) - deficit, -_INF)
                    # Columns ascend, and the first of equal scores stays.
                    best_column = tl.where(score > best, named, best_column)
                    best = tl.maximum(best, score)
            column = tl.min(tl.where(best == tl.max(best, 0), best_column, size), 0)
    # A row without a token may have no column either.
    column = tl.minimum(column, size - 1)
    token = column.to(tl.int64)
    if token_ids is not None:
        token = tl.load(token_ids + column)
    tl.store(tokens + row, tl.where(tl.abs(top) < _INF, token, -1))


@triton.jit
def _first_largest(score, column, size):  # type: ignore[no-untyped-def]
    """The largest score of a chunk and its first column; `size` where no score is."""
    top = tl.max(score, 0)
    return top, tl.min(tl.where(score == top, column, size), 0)


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    largest, columns, sums, logits, rows, row_stride, size, chunk_size: tl.constexpr
):
    """One chunk of a row: its first largest score, and the sum of its probabilities relative to that."""
    chunk, line = tl.program_id(0), tl.program_id(1)
    place = line * tl.num_programs(0) + chunk
    column = chunk * chunk_size + tl.arange(0, chunk_size)
    score = _scores(logits, tl.load(rows + line), row_stride, column, column < size)
    top, first = _first_largest(score, column, size)
    tl.store(largest + place, top)
    tl.store(columns + place, first)
    tl.store(sums + place, tl.sum(tl.exp(score - tl.where(top == -_INF, 0.0, top)), 0))


# One program for any number of likeliest tokens.
@triton.jit(do_not_specialize=["likeliest"])
def _likeliest(  # type: ignore[no-untyped-def]
    found,
    largest,
    columns,
    sums,
    logits,
    rows,
    tokens,
    row_stride,
    size,
    likeliest,
    count,
    chunk_size: tl.constexpr,
    chunks: tl.constexpr,
):
    """One row, of `count` chunks: the numbers of `LogitsScan.logprobs`. One program adds up all chunks, in one order;
    each likeliest token is the first largest of all chunks, of which its own then has the one that follows."""
    line, chunk = tl.program_id(0), tl.arange(0, chunks)
    row, exists = tl.load(rows + line), chunk < count
    tops = tl.load(largest + line * count + chunk, mask=exists, other=-_INF)
    firsts = tl.load(columns + line * count + chunk, mask=exists, other=size)
    top = tl.max(tops, 0)
    log = tl.log(tl.sum(tl.load(sums + line * count + chunk, mask=exists, other=0.0) * tl.exp(tops - top), 0))
    found += line.to(tl.int64) * (2 * likeliest + 1)
    own = _scores(logits, row, row_stride, tl.load(tokens + line), True)
    tl.store(found, (-(top - own) - log).to(tl.float64).to(tl.int64, bitcast=True))
    for rank in range(likeliest):
        best = tl.max(tops, 0)
        first = tl.min(tl.where(tops == best, firsts, size), 0)
        tl.store(found + 1 + rank, tl.minimum(first, size - 1).to(tl.int64))
        tl.store(found + 1 + likeliest + rank, (-(top - best) - log).to(tl.float64).to(tl.int64, bitcast=True))
        place = first // chunk_size
        column = place * chunk_size + tl.arange(0, chunk_size)
        score = _scores(logits, row, row_stride, column, column < size)
        follows = (score < best) | ((score == best) & (column > first))
        next_top, next_first = _first_largest(tl.where(follows, score, -_INF), column, size)
        tops = tl.where(chunk == place, next_top, tops)
        firsts = tl.where(chunk == place, next_first, firsts)


class TritonScan(LogitsScan):
    beside_host = True

    def __init__(self, listed_at_once: int = LISTED_AT_ONCE) -> None:
        """So many numbers of rows are sampled at a time; see the memory plan."""
        self._listed_at_once = listed_at_once

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingContext], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        draws = [row.draw for row in rows]
        changes = _Changes.of(rows, logits.device) if any(row.changes_scores for row in rows) else None
        size, device = logits.shape[1], logits.device
        if size > 1 << _COLUMN_BITS.value:
            raise ValueError(f"the vocabulary has {size} tokens, must have at most {1 << _COLUMN_BITS.value}")
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        given = None
        if any(draw.temperature for draw in draws):
            given = on_device(_numbers(draws), device).view(len(draws), _FIELDS.value)
        filters = any(draw.temperature and draw.filters for draw in draws)
        tokens = torch.empty(len(draws), dtype=torch.int64, device=device)
        with current(device):
            for some in _row_slices(len(draws), self._listed_at_once // size):
                own = logits[some] if changes is None else changes.applied(logits[some], some.start, token_ids)
                _choose_rows(tokens[some], own, None if given is None else given[some], filters, token_ids)
        return tokens

    @torch.inference_mode()
    def logprobs(self, logits: torch.Tensor, rows: Sequence[int], tokens: torch.Tensor, count: int) -> torch.Tensor:
        size, device = logits.shape[1], logits.device
        likeliest, chunks, index = min(count, size), triton.cdiv(size, CHUNK), on_device(rows, device)
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        largest, sums = (torch.empty(len(rows), chunks, device=device) for _ in range(2))
        columns = torch.empty(len(rows), chunks, dtype=torch.int32, device=device)
        found = torch.empty(len(rows), 2 * likeliest + 1, dtype=torch.int64, device=device)
        with current(device):
            _sum[(chunks, len(rows))](largest, columns, sums, logits, index, logits.stride(0), size, CHUNK)
            _likeliest[(len(rows),)](
                found,
                largest,
                columns,
                sums,
                logits,
                index,
                tokens,
                logits.stride(0),
                size,
                likeliest,
                chunks,
                CHUNK,
                triton.next_power_of_2(chunks),
            )
        return found

    @torch.inference_mode()
    def digests(self, scores: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        size, device, per_word = scores.shape[1], scores.device, 8 // scores.element_size()
        digests, which = torch.zeros(len(rows), dtype=torch.int64, device=device), on_device(rows, device)
        bits = scores.view(torch.int16 if per_word == 4 else torch.int32)
        with current(device):
            _digest[(triton.cdiv(size, CHUNK * per_word), len(rows))](
                digests, bits, which, scores.stride(0), size, per_word, CHUNK
            )
        return digests

    @torch.inference_mode()
    def forbid(
        self,
        scores: torch.Tensor,
        rows: Sequence[int],
        allowed: NDArray[np.uint8],
        token_ids: torch.Tensor | None = None,
    ) -> None:
        size, device = scores.shape[1], scores.device
        which, bits = on_device(rows, device), _uploaded(torch.from_numpy(np.ascontiguousarray(allowed)), device)
        grid = (triton.cdiv(size, CHUNK), len(rows))
        with current(device):
            _forbid[grid](scores, which, bits, token_ids, scores.stride(0), size, bits.shape[1], CHUNK)


@dataclass(frozen=True, slots=True)
class _Changes:
    """As `_change` takes them, for all rows."""

    words: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[SamplingContext], device: torch.device) -> _Changes:
        tokens, numbers, ends = array("q"), array("f"), [0]
        for row in rows:
            changes = dict(row.changes()) if row.changes_scores else {}
            for kind in Change:
                tokens.extend(changes.get(kind, {}).keys())
                numbers.extend(changes.get(kind, {}).values())
                ends.append(len(tokens))
        low = torch.tensor(array("i", numbers.tobytes()), dtype=torch.int64) & 0xFFFFFFFF
        return cls(_uploaded(torch.tensor(tokens, dtype=torch.int64) << 32 | low, device), on_device(ends, device))

    def applied(self, scores: torch.Tensor, first: int, token_ids: torch.Tensor | None) -> torch.Tensor:
        """A float32 copy of scores [R, V] of the rows from the `first` on, changed."""
        changed = scores.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        ends = self.ends[first * len(Change) :]
        _change[(len(changed),)](
            changed, self.words, ends, token_ids, changed.shape[1], len(Change), enable_fp_fusion=False
        )
        return changed


def _uploaded(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host_buffer(numbers.shape, numbers.dtype, device).copy_(numbers).to(device, non_blocking=True)


def _numbers(draws: Sequence[Draw]) -> list[int]:
    """As kernels take them, see `_FIELDS`."""
    temperatures = array("i", array("f", [draw.temperature for draw in draws]).tobytes())
    exact = array("q", array("d", [x for draw in draws for x in (draw.top_p, draw.min_p * _WEIGHT.value)]).tobytes())
    found = list[int]()
    for place, (draw, temperature) in enumerate(zip(draws, temperatures, strict=True)):
        found += draw.key, temperature, draw.top_k, *exact[2 * place : 2 * place + 2], 0
    return found


def _row_slices(rows: int, at_once: int) -> Iterator[slice]:
    """Begin at multiples of 16 bytes: Triton compiles another kernel for a tensor that does not."""
    step = at_once - at_once % 16 if at_once > 16 else max(1, at_once)
    for first in range(0, rows, step):
        yield slice(first, min(rows, first + step))


def _choose_rows(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    draws: torch.Tensor | None,
    filters: bool,
    token_ids: torch.Tensor | None,
) -> None:
    (rows, size), device, stride = scores.shape, scores.device, scores.stride(0)
    count = triton.cdiv(size, CHUNK)
    chunks = triton.next_power_of_2(count)
    largest, arrivals = (torch.empty(rows, count, dtype=torch.float32, device=device) for _ in range(2))
    columns = torch.empty(rows, count, dtype=torch.int32, device=device)
    listed: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    if draws is not None:
        listed = torch.empty(rows, size, dtype=torch.int64, device=device)
    if filters:
        sums = torch.empty(rows, _LEVELS.value, dtype=torch.int64, device=device)
    _scan[(count, rows)](largest, columns, arrivals, sums, scores, draws, token_ids, stride, size, CHUNK)
    # A multiplication and an addition in one operation give other bits than both.
    if sums is not None:
        _weigh[(count, rows)](sums, largest, scores, draws, stride, size, CHUNK, chunks, enable_fp_fusion=False)
    _choose[(rows,)](
        tokens,
        listed,
        largest,
        columns,
        arrivals,
        sums,
        scores,
        draws,
        token_ids,
        stride,
        size,
        count,
        CHUNK,
        chunks,
        enable_fp_fusion=False,
        num_warps=8,
    )
