"""The kernels between a decoder's linear layers, in Triton's interpreter: a row has its bits in any company."""

from __future__ import annotations

import copy
import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

from spool.engine.kv.paged_kv import LayerKv
from tests.support.triton_kernel import interpreted_attention, multiply_in_one_order

if TYPE_CHECKING:
    from spool.engine.cuda.triton_product import Parts

CPU = torch.device("cpu")
PAGES, PAGE = 6, 16
ROW_COUNTS = (1, 2, 17, 33)


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    interpreted_attention()
    return importlib.import_module("spool.engine.cuda.triton_rows")


@pytest.fixture(autouse=True)
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_in_one_order(monkeypatch)


dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def random(dtype: torch.dtype, *shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parts(sums: torch.Tensor, bias: torch.Tensor | None = None) -> Parts:
    """`[parts, rows, out]`."""
    return importlib.import_module("spool.engine.cuda.triton_product").Parts(sums, bias)


def whole(product: torch.Tensor) -> Parts:
    return parts(product[None])


class Heads:
    """Random heads of rows, their angles and places in a pool, which holds something else everywhere."""

    def __init__(
        self,
        rows: int,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        normalized: bool,
        quantized: bool = False,
    ) -> None:
        self.query_heads, self.kv_heads, self.dtype = query_heads, kv_heads, dtype
        self.qkv = random(dtype, rows, (query_heads + 2 * kv_heads) * head_dim)
        angles = torch.rand(rows, head_dim // 2, generator=torch.Generator().manual_seed(4)) * 6
        self.cos, self.sin = angles.cos().repeat(1, 2).to(dtype), angles.sin().repeat(1, 2).to(dtype)
        self.slots = torch.randperm(PAGES * PAGE, generator=torch.Generator().manual_seed(5))[:rows]
        self.norms = None
        if normalized:
            self.norms = (random(dtype, head_dim, seed=6), random(dtype, head_dim, seed=7), 1e-6)
        self.layer = LayerKv(PAGES, kv_heads, PAGE, head_dim, dtype, CPU, quantized)
        self.layer.fill(random(dtype, 2, PAGES, kv_heads, PAGE, head_dim, seed=8))

    def rotate_write(
        self, kernels: ModuleType, rows: slice, qkv: Parts | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, and keys and values `[2, slots, kv_heads, head_dim]`, for a part of the rows."""
        layer = copy.deepcopy(self.layer)
        given = [values[rows].contiguous() for values in (self.cos, self.sin, self.slots)]
        queries = kernels.rotate_write(qkv or whole(self.qkv[rows]), *given, layer, self.query_heads, self.norms)
        return queries, self.by_slot(layer.content())

    @staticmethod
    def by_slot(pool: torch.Tensor) -> torch.Tensor:
        return pool.transpose(2, 3).flatten(1, 2)


def test_bits_of_a_row_do_not_depend_on_its_company(kernels: ModuleType) -> None:
    """In float32, which rounds no difference away."""
    rows, dtype = max(ROW_COUNTS), torch.float32
    heads = Heads(rows, 3, 1, 32, dtype, normalized=True)
    x, added, weight = random(dtype, rows, 300), random(dtype, rows, 300, seed=2), random(dtype, 300, seed=3)

    def computed(part: slice) -> list[torch.Tensor]:
        residual = x[part].clone()
        queries, pool = heads.rotate_write(kernels, part)
        normed = kernels.add_norm(residual, whole(added[part]), weight, 1e-5)
        return [residual, normed, kernels.silu_mul(whole(x[part]), dtype), queries, pool[0, heads.slots[part]]]

    exclusive = {row: computed(slice(row, row + 1)) for row in (0, 1, 16, rows - 1)}
    for count in ROW_COUNTS:
        for first in (0, rows - count):
            together = computed(slice(first, first + count))
            for row in exclusive.keys() & range(first, first + count):
                for several, alone in zip(together, exclusive[row], strict=True):
                    assert torch.equal(several[row - first], alone[0])


@dtypes
@pytest.mark.parametrize("normalized", [False, True])
def test_codes_are_those_of_the_rows_that_are_written_else(
    kernels: ModuleType, dtype: torch.dtype, normalized: bool
) -> None:
    plain, coded = (Heads(9, 6, 3, 80, dtype, normalized, quantized) for quantized in (False, True))
    plain.qkv[2] = 0
    plain.qkv[3] *= 1e-6
    coded.qkv.copy_(plain.qkv)
    queries, elements = plain.rotate_write(kernels, slice(None))
    of_codes, numbers = coded.rotate_write(kernels, slice(None))
    assert torch.equal(queries, of_codes)
    expected = copy.deepcopy(coded.layer)
    places = (coded.slots // PAGE * 3 * PAGE + coded.slots % PAGE)[:, None] + torch.arange(3) * PAGE
    expected.write(places.flatten(), *elements[:, coded.slots].flatten(1, 2).to(dtype))
    assert torch.equal(numbers, coded.by_slot(expected.content()))


@dtypes
@pytest.mark.parametrize("has_bias", [False, True])
def test_parts_of_products_have_the_bits_of_their_sum(kernels: ModuleType, dtype: torch.dtype, has_bias: bool) -> None:
    heads = Heads(3, 4, 2, 32, dtype, normalized=True)
    width = heads.qkv.shape[1]
    sums, bias = random(torch.float32, 3, 3, width), random(dtype, width, seed=2) if has_bias else None
    product = sums[0] + sums[1] + sums[2]
    product = (product if bias is None else product + bias.float()).to(dtype)
    residual, weight = random(dtype, 3, width, seed=3), random(dtype, width, seed=4)

    def computed(of: Parts) -> list[torch.Tensor]:
        added = residual.clone()
        normed = kernels.add_norm(added, of, weight, 1e-5)
        return [added, normed, kernels.silu_mul(of, dtype), *heads.rotate_write(kernels, slice(None), of)]

    for found, expected in zip(computed(parts(sums, bias)), computed(whole(product)), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
