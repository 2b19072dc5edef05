"""The kernels between a decoder's linear layers, in Triton's interpreter: they compute what a layer's description says,
and a row has its bits in any company."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)

from spool.engine.kv.paged_kv import LayerKv
from spool.engine.layers.description import Activation, HeadNorms, Norm, Rotation
from tests.support.triton_kernel import interpreted_attention, multiply_in_one_order

if TYPE_CHECKING:
    from spool.engine.cuda.triton_product import Parts
    from spool.engine.cuda.triton_rows import Added

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


def added(product: Parts, post_norm: Norm | None = None, multiplier: float = 1.0) -> Added:
    return importlib.import_module("spool.engine.cuda.triton_rows").Added(product, post_norm, multiplier)


def random_norm(width: int, seed: int, centred: bool = False) -> Norm:
    """With a bias if it is centred."""
    bias = random(torch.float32, width, seed=seed + 100) if centred else None
    return Norm(random(torch.float32, width, seed=seed), 1e-5, bias, centred)


def normalized(rows: torch.Tensor, norm: Norm) -> torch.Tensor:
    """In float32."""
    rows = rows.float()
    rows = rows - rows.mean(-1, keepdim=True) if norm.centred else rows
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + norm.epsilon) * norm.weight
    return rows if norm.bias is None else rows + norm.bias


class Heads:
    """Random heads of rows, their angles and places in a pool, which holds something else everywhere. `norms`: what
    kind of them, "" for none."""

    def __init__(
        self,
        rows: int,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        norms: str = "each",
        quantized: bool = False,
    ) -> None:
        self.query_heads, self.kv_heads, self.dtype = query_heads, kv_heads, dtype
        self.qkv = random(dtype, rows, (query_heads + 2 * kv_heads) * head_dim)
        angles = torch.rand(rows, head_dim // 2, generator=torch.Generator().manual_seed(4)) * 6
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.slots = torch.randperm(PAGES * PAGE, generator=torch.Generator().manual_seed(5))[:rows]
        self.norms = None
        if norms:
            queries, keys = (
                random_norm(heads * head_dim, seed, "centred" in norms)
                for heads, seed in ((query_heads, 6), (kv_heads, 7))
            )
            self.norms = HeadNorms(queries, keys, "whole" in norms, "after" in norms)
        self.layer = LayerKv(PAGES, kv_heads, PAGE, head_dim, dtype, CPU, quantized)
        self.layer.fill(random(dtype, 2, PAGES, kv_heads, PAGE, head_dim, seed=8))

    def rotate_write(
        self, kernels: ModuleType, rows: slice, qkv: Parts | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, and keys and values `[2, slots, kv_heads, head_dim]`, for a part of the rows."""
        layer = copy.deepcopy(self.layer)
        given = [values[rows].contiguous() for values in (self.cos, self.sin, self.slots)]
        norm = None if self.norms is None else kernels.NormOfHeads.of(self.norms)
        queries = kernels.rotate_write(qkv or whole(self.qkv[rows]), *given, layer, self.query_heads, norm)
        return queries, self.by_slot(layer.content())

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of all rows, `[rows, heads, head_dim]`, in float32."""
        heads, keys = self.query_heads, self.query_heads + self.kv_heads
        rows = self.qkv.float().unflatten(-1, (keys + self.kv_heads, -1))
        queries, found, values = rows[:, :heads], rows[:, heads:keys], rows[:, keys:]
        if self.norms is None:
            return self.rotated(queries), self.rotated(found), values
        if self.norms.after_rotation:
            return self.normed(self.rotated(queries), True), self.normed(self.rotated(found), False), values
        return self.rotated(self.normed(queries, True)), self.rotated(self.normed(found, False)), values

    def normed(self, rows: torch.Tensor, of_queries: bool) -> torch.Tensor:
        assert self.norms is not None
        norm = self.norms.queries if of_queries else self.norms.keys
        if self.norms.whole:
            return normalized(rows.flatten(1), norm).view(rows.shape)
        bias = None if norm.bias is None else norm.bias.view(rows.shape[1:])
        return normalized(rows, Norm(norm.weight.view(rows.shape[1:]), norm.epsilon, bias, norm.centred))

    def rotated(self, rows: torch.Tensor) -> torch.Tensor:
        cos, sin = (part.float().unsqueeze(1) for part in (self.cos, self.sin))
        first, second = rows.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    @staticmethod
    def by_slot(pool: torch.Tensor) -> torch.Tensor:
        return pool.transpose(2, 3).flatten(1, 2)


@pytest.mark.parametrize("norms", ["each", pytest.param("whole, centred", marks=pytest.mark.slow)])
def test_bits_of_a_row_do_not_depend_on_its_company(kernels: ModuleType, norms: str) -> None:
    """In float32, which rounds no difference away."""
    rows, dtype, centred = max(ROW_COUNTS), torch.float32, "centred" in norms
    heads = Heads(rows, 3, 1, 32, dtype, norms)
    x, more = random(dtype, rows, 300), random(dtype, rows, 300, seed=2)
    norm, post_norm = random_norm(300, 3, centred), random_norm(300, 4) if centred else None

    def computed(part: slice) -> list[torch.Tensor]:
        residual = x[part].clone()
        queries, pool = heads.rotate_write(kernels, part)
        normed = kernels.add_norm(residual, added(whole(more[part]), post_norm), norm)
        activated = kernels.activate(whole(x[part]), dtype, Activation.SILU)
        return [residual, normed, activated, queries, pool[0, heads.slots[part]]]

    exclusive = {row: computed(slice(row, row + 1)) for row in (0, 1, 16, rows - 1)}
    for count in ROW_COUNTS:
        for first in (0, rows - count):
            together = computed(slice(first, first + count))
            for row in exclusive.keys() & range(first, first + count):
                for several, alone in zip(together, exclusive[row], strict=True):
                    assert torch.equal(several[row - first], alone[0])


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("multiplier", [1.0, 0.25])
@pytest.mark.parametrize("post", [False, True])
def test_what_is_added_is_normalized_and_multiplied(
    kernels: ModuleType, centred: bool, multiplier: float, post: bool
) -> None:
    before, product = random(torch.float32, 5, 48), random(torch.float32, 5, 48, seed=2)
    norm, post_norm = random_norm(48, 3, centred), random_norm(48, 4, centred) if post else None
    sums = before + multiplier * (product if post_norm is None else normalized(product, post_norm))
    for of_residual in (False, True):
        residual = before.clone()
        found = kernels.add_norm(residual, added(whole(product), post_norm, multiplier), norm, of_residual=of_residual)
        torch.testing.assert_close(residual, sums)
        torch.testing.assert_close(found, normalized(before if of_residual else sums, norm))
    residual = before.clone()
    assert kernels.add_norm(residual, added(whole(product), post_norm, multiplier), None) is residual
    torch.testing.assert_close(residual, sums)
    torch.testing.assert_close(kernels.add_norm(residual, None, norm), normalized(sums, norm))


@pytest.mark.parametrize("norms", ["", "each", "each, centred", "each, after", "whole", "whole, centred"])
def test_heads_are_normalized_and_rotated(kernels: ModuleType, norms: str) -> None:
    for query_heads, kv_heads, head_dim in ((6, 3, 80), (5, 1, 32)):
        heads = Heads(3, query_heads, kv_heads, head_dim, torch.float32, norms)
        queries, pool = heads.rotate_write(kernels, slice(None))
        for found, expected in zip((queries, *pool[:, heads.slots]), heads.expected(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_angles_are_scaled_and_rounded(kernels: ModuleType, dtype: torch.dtype) -> None:
    positions, frequencies = torch.tensor([0, 1, 7, 300]), torch.rand(40, generator=torch.Generator().manual_seed(1))
    rotation = Rotation(frequencies, random(torch.float32, 40).abs(), dtype)
    angles = positions[:, None] * frequencies
    for found, of_angles in zip(kernels.rotations(positions, rotation), (angles.cos(), angles.sin()), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), (of_angles * rotation.scalings).to(dtype).float())


ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda rows: F.gelu(rows, approximate="tanh"),
    Activation.RELU: F.relu,
    Activation.RELU_SQUARED: lambda rows: F.relu(rows).square(),
}


@pytest.mark.parametrize("activation", Activation, ids=lambda activation: activation.name)
def test_activations_are_those_of_torch(kernels: ModuleType, activation: Activation) -> None:
    rows = torch.cat(
        (random(torch.float32, 3, 1500) * 4, torch.tensor([[-100.0, 100.0], [0.0, -0.0], [20.0, -20.0]])), 1
    )
    expected = ACTIVATIONS[activation](rows)
    torch.testing.assert_close(kernels.activate(whole(rows), torch.float32, activation, gated=False), expected)
    gates, fellows = rows.chunk(2, -1)
    expected = ACTIVATIONS[activation](gates) * fellows
    torch.testing.assert_close(kernels.activate(whole(rows), torch.float32, activation), expected)


@dtypes
@pytest.mark.parametrize("norms", ["", "each"])
def test_codes_are_those_of_the_rows_that_are_written_else(kernels: ModuleType, dtype: torch.dtype, norms: str) -> None:
    plain, coded = (Heads(9, 6, 3, 80, dtype, norms, quantized) for quantized in (False, True))
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
    heads = Heads(3, 4, 2, 32, dtype)
    width = heads.qkv.shape[1]
    sums, bias = random(torch.float32, 3, 3, width), random(dtype, width, seed=2) if has_bias else None
    product = sums[0] + sums[1] + sums[2]
    product = (product if bias is None else product + bias.float()).to(dtype)
    residual, norm = random(dtype, 3, width, seed=3), random_norm(width, 4)

    def computed(of: Parts) -> list[torch.Tensor]:
        sums = residual.clone()
        normed = kernels.add_norm(sums, added(of), norm)
        activated = kernels.activate(of, dtype, Activation.SILU)
        return [sums, normed, activated, *heads.rotate_write(kernels, slice(None), of)]

    for found, expected in zip(computed(parts(sums, bias)), computed(whole(product)), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
