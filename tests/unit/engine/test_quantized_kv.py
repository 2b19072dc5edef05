"""KV in 8 bits: every way to write a row gives the codes and the scale that plain Python does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spool.engine.kv.paged_kv import LayerKv, PagedKv, PagedKvStore
from tests.support.cpu_kernels import ISAS, compiled_kernels

CPU = torch.device("cpu")
PAGES, KV_HEADS, PAGE, DIM = 5, 2, 16, 64
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def by_hand(row: list[float]) -> tuple[list[int], float]:
    """Codes and scale of a row. float32's operations are numpy's, and Python rounds ties to even."""
    with np.errstate(all="ignore"):
        numbers = [np.float32(number) for number in row]
        largest = np.float32(math.nan) if any(map(math.isnan, row)) else max(abs(number) for number in numbers)
        scale = largest / np.float32(127)
        if scale < np.float32(2.0**-126):
            return [0] * len(row), 0.0
        codes = [float(number / scale) for number in numbers]
    return [round(code) if math.isfinite(code) else 0 for code in codes], float(scale)


def rows_of(dtype: torch.dtype, head_dim: int = DIM) -> torch.Tensor:
    """Usual rows, ties, zeros, numbers next to the ends of the dtype, and some that are none."""
    rows = torch.randn(40, head_dim, generator=torch.Generator().manual_seed(1))
    rows[::5] *= torch.logspace(-30, 3, 8)[:, None]
    rows[1] = torch.arange(head_dim) - head_dim / 2 + 0.5
    rows[1, 0] = 127
    rows[2] = 0
    rows[3, 1:] = 0
    rows[4] *= 1e-38
    rows[6, 3] = math.nan
    rows[7, 5] = math.inf
    rows[8, 0], rows[8, 1] = -math.inf, math.nan
    rows[9] = -rows[9].abs().max()
    return rows.to(dtype)


def written(rows: torch.Tensor) -> tuple[LayerKv, torch.Tensor]:
    """A layer with keys `rows` and values in the opposite order, each KV head with other rows; and their slots."""
    layer = LayerKv(PAGES, KV_HEADS, PAGE, rows.shape[1], rows.dtype, CPU, True)
    slots = torch.randperm(PAGES * PAGE, generator=torch.Generator().manual_seed(2))[: len(rows) // KV_HEADS]
    places = (slots // PAGE * KV_HEADS * PAGE + slots % PAGE)[:, None] + torch.arange(KV_HEADS) * PAGE
    layer.write(places.flatten(), rows, rows.flip(0))
    return layer, slots


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pass_writes_the_codes_and_scales_of_plain_python(dtype: torch.dtype) -> None:
    rows = rows_of(dtype)
    layer, slots = written(rows)
    codes, scales = layer.parts
    content = codes.float() * scales[..., None]
    assert torch.allclose(layer.content(), content, rtol=0, atol=0, equal_nan=True)
    for index, row in enumerate(rows.tolist()):
        for which, place in enumerate((index, len(rows) - 1 - index)):
            slot, head = int(slots[place // KV_HEADS]), place % KV_HEADS
            at = (which, slot // PAGE, head, slot % PAGE)
            expected_codes, expected_scale = by_hand(row)
            assert codes[at].tolist() == expected_codes
            assert np.array_equal(float(scales[at]), expected_scale, equal_nan=True)


# The quick tests of a fresh checkout compile for the best set only.
SMALLER = [pytest.param(isa, torch.bfloat16, marks=pytest.mark.slow) for isa in ISAS[1:]]


@pytest.mark.parametrize("head_dim", [32, 64, 96])
@pytest.mark.parametrize(("isa", "dtype"), [*((ISAS[0], dtype) for dtype in DTYPES), *SMALLER], ids=str)
def test_cpu_kernels_write_the_same(isa: str, dtype: torch.dtype, head_dim: int) -> None:
    rows = rows_of(dtype, head_dim)
    expected, slots = written(rows)
    found = LayerKv(PAGES, KV_HEADS, PAGE, head_dim, dtype, CPU, True)
    qkv = torch.zeros(len(slots), 1 + 2 * KV_HEADS, head_dim, dtype=dtype)
    qkv[:, 1:] = torch.stack((rows, rows.flip(0))).view(2, -1, KV_HEADS, head_dim).transpose(0, 1).flatten(1, 2)
    # No turn, so that keys that are no numbers stay in their places.
    rotation = (torch.ones(len(slots), 1, head_dim), torch.zeros(len(slots), 1, head_dim))
    finite = qkv.isfinite().flatten(1).all(1)
    qkv[~finite] = 1
    compiled_kernels(dtype, isa).rotate_write(qkv.flatten(1), rotation, slots, found, 1, None)
    for part, of_part in zip(found.parts, expected.parts, strict=True):
        for slot in slots[finite].tolist():
            assert torch.equal(part[:, slot // PAGE, :, slot % PAGE], of_part[:, slot // PAGE, :, slot % PAGE])


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("isa", "dtype"), [(ISAS[0], torch.float32), *SMALLER], ids=str)
def test_a_row_that_is_not_finite_stays_so(isa: str, dtype: torch.dtype, number: float) -> None:
    layer = LayerKv(PAGES, 1, PAGE, 32, dtype, CPU, True)
    qkv = torch.ones(1, 3 * 32, dtype=dtype)
    qkv[0, 70] = number
    rotation = (torch.ones(1, 1, 32), torch.zeros(1, 1, 32))
    compiled_kernels(dtype, isa).rotate_write(qkv, rotation, torch.tensor([3]), layer, 1, None)
    keys, values = layer.content()[:, 0, 0, 3]
    assert torch.allclose(keys, torch.ones(32, dtype=keys.dtype))
    assert not values.isfinite().any()


def pool(seed: int, quantized: bool = True) -> PagedKv:
    kv = PagedKv(2, PAGES, PAGE, KV_HEADS, DIM, torch.bfloat16, CPU, quantized)
    for number, layer in enumerate(kv.layers):
        generator = torch.Generator().manual_seed(seed + number)
        layer.fill(torch.randn(2, kv.pages, KV_HEADS, PAGE, DIM, generator=generator))
    return kv


@pytest.mark.parametrize(("quantized", "row_bytes"), [(True, DIM + 4), (False, 2 * DIM)])
def test_pages_move_whole(quantized: bool, row_bytes: int) -> None:
    source, destination = pool(1, quantized), pool(9, quantized)
    before = [layer.content() for layer in destination.layers]
    giving, taking = (PagedKvStore(kv, "m", b"d") for kv in (source, destination))
    assert giving.layout == taking.layout
    assert giving.layout.dtype == ("int8" if quantized else "bfloat16")
    pages = giving.read_pages([3, 2])
    assert {len(page) for page in pages} == {giving.layout.page_bytes} == {2 * 2 * KV_HEADS * PAGE * row_bytes}
    with pytest.raises(ValueError, match="must be of"):
        taking.write_pages([3, 1], [pages[0], pages[1][:-1]])
    taking.write_pages([1, 0], pages)
    for old, layer, given in zip(before, destination.layers, source.layers, strict=True):
        for number in range(PAGES):
            expected = given.content()[:, 3 - (number == 0)] if number < 2 else old[:, number]
            assert torch.equal(layer.content()[:, number], expected)


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_many_pages_move_by_as_many_operations_as_one() -> None:
    store, counts = PagedKvStore(pool(1), "m", b""), []
    for pages in ([2], [4, 0, 3]):
        with Operations() as operations:
            store.write_pages(pages, store.read_pages(pages))
        counts.append(operations.count)
    assert counts[0] == counts[1]


def test_scrubbed_positions_are_zeros_without_a_scale() -> None:
    kv = pool(1)
    before = [layer.content() for layer in kv.layers]
    kv.scrub(0, [4, 0], 5)
    for old, layer in zip(before, kv.layers, strict=True):
        old[:, 4, :, 5:] = 0
        old[:, 0] = 0
        assert torch.equal(layer.content(), old)
        assert not layer.parts[1][:, 0].any()


def test_scales_that_would_lie_across_words_are_refused() -> None:
    with pytest.raises(ValueError, match="page_size is 3, must be a multiple of 4 for quantised KV of heads of 6"):
        PagedKv(1, 4, 3, 1, 6, torch.float32, CPU, True)
