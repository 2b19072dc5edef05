"""The matrix product for GPUs, in Triton's interpreter: right values, and bits that do not depend on the company."""

from __future__ import annotations

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import nn

from tests.support.triton_kernel import interpreted, multiply_in_one_order

# Outputs and inner dimensions: of whole blocks, and of none.
EVEN, UNEVEN = (64, 512), (72, 528)
DTYPES = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = interpreted("engine.cuda.triton_product")
    multiply_in_one_order(monkeypatch)
    return module


def operands(
    rows: int, size: tuple[int, int], dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, weight and bias."""
    generator = torch.Generator().manual_seed(1)
    out_features, in_features = size
    shapes = [(rows, in_features), (out_features, in_features), (out_features,)]
    inputs, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return inputs.to(dtype), (weight / in_features**0.5).to(dtype), bias.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [EVEN, UNEVEN])
@pytest.mark.parametrize(
    ("rows", "has_bias", "splits", "joined"),
    [(1, True, 4, False), (17, False, 2, True), (33, False, 1, False), (90, True, 2, False), (90, True, 4, True)],
)
def test_products_are_those_of_torch(
    kernel: ModuleType,
    dtype: torch.dtype,
    size: tuple[int, int],
    rows: int,
    has_bias: bool,
    splits: int,
    joined: bool,
) -> None:
    inputs, weight, bias = operands(rows, size, dtype)
    shape = kernel.ProductShape(64, 64, splits, stages=4, warps=4, joined=joined)
    found = kernel.product(inputs, weight, bias if has_bias else None, shape)
    expected = nn.functional.linear(inputs.float(), weight.float(), bias.float() if has_bias else None)
    assert found.dtype == dtype
    assert torch.allclose(found.float(), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize(("splits", "joined"), [(1, False), (4, False), (4, True)])
def test_parts_add_up_to_the_product(kernel: ModuleType, splits: int, joined: bool) -> None:
    inputs, weight, bias = operands(5, UNEVEN)
    shape = kernel.ProductShape(64, 64, splits, stages=4, warps=4, joined=joined)
    sums, rest_of_bias = kernel.product_parts(inputs, weight, bias, shape)
    assert len(sums) == (1 if joined else splits)
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    if rest_of_bias is not None:
        total = total + rest_of_bias.float()
    assert torch.equal(total.half(), kernel.product(inputs, weight, bias, shape))


@pytest.mark.parametrize("rows", [1, 16, 17, 40, 65, 97, 130, 161, 193])
def test_every_number_of_rows_has_a_tile(kernel: ModuleType, rows: int) -> None:
    inputs, weight, bias = operands(rows, (72, 80))
    expected = nn.functional.linear(inputs.float(), weight.float(), bias.float())
    assert torch.allclose(kernel.product(inputs, weight, bias).float(), expected, rtol=2e-3, atol=2e-3)


def test_a_layer_takes_rows_in_any_arrangement(kernel: ModuleType) -> None:
    linear = nn.Linear(96, 40, dtype=torch.float16)
    layer = kernel.TritonLinear(linear)
    rows = torch.randn(96, 3, 2, generator=torch.Generator().manual_seed(1)).half().permute(1, 2, 0)
    found = layer(rows)
    expected = nn.functional.linear(rows.float(), linear.weight.float(), linear.bias.float())
    assert (layer.in_features, layer.out_features) == (96, 40)
    assert torch.allclose(found.float(), expected, rtol=2e-3, atol=2e-3)
    assert layer(rows[:0]).shape == (0, 2, 40)


def test_what_rows_share_a_call_with_does_not_leak_in(kernel: ModuleType) -> None:
    inputs, weight, bias = operands(40, UNEVEN)
    before = kernel.product(inputs, weight, bias)
    inputs[7:] = float("nan")
    assert torch.equal(kernel.product(inputs, weight, bias)[:7], before[:7])


# By default: 64 outputs a program and 128, parts in programs of their own and in one.
COMPANIES = [2, 16, 17, 33, 64, 65, 130, 200]


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, EVEN), (torch.bfloat16, UNEVEN)])
def test_bits_of_a_row_do_not_depend_on_what_shares_its_call(
    kernel: ModuleType, dtype: torch.dtype, size: tuple[int, int]
) -> None:
    inputs, weight, bias = operands(max(COMPANIES), size, dtype)
    alone = torch.cat([kernel.product(inputs[row : row + 1], weight, bias) for row in range(5)])
    for rows in COMPANIES:
        together = kernel.product(inputs[:rows], weight, bias)
        assert torch.equal(together[:5], alone[:rows])
        # At other places of the call.
        moved = kernel.product(inputs[:rows].roll(rows // 2, 0), weight, bias)
        assert torch.equal(moved.roll(-(rows // 2), 0), together)


@pytest.mark.parametrize(("splits", "rows"), [(1, 90), (2, 33), (4, 20)])
def test_bits_follow_from_blocks_and_parts_of_the_inner_dimension_alone(
    kernel: ModuleType, splits: int, rows: int
) -> None:
    inputs, weight, bias = operands(rows, UNEVEN)
    shape = kernel.ProductShape(64, 64, splits, stages=4, warps=4)
    found = kernel.product(inputs, weight, bias, shape)
    for other in [replace(shape, joined=True), replace(shape, block_out=128, warps=8, stages=3)]:
        assert torch.equal(kernel.product(inputs, weight, bias, other), found)
    # An order of its own is seen.
    assert not torch.equal(kernel.product(inputs, weight, bias, replace(shape, splits=8)), found)


def test_blocks_and_parts_of_the_inner_dimension_do_not_depend_on_rows(kernel: ModuleType) -> None:
    for size in [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096), (1024, 2048), (40, 64)]:
        shapes = [kernel.product_shape(*size, rows) for rows in (1, 32, 64, 65, 192, 193, 5000)]
        assert len({(shape.block_in, shape.splits) for shape in shapes}) == 1


@dataclass(frozen=True)
class Build:
    rows: int
    tile: int
    stack: int
    shared_memory: int
    waits: int
    instructions: set[str]


def builds(architecture: int, size: tuple[int, int], all_rows: list[int]) -> list[Build]:
    """The kernel, compiled for a GPU and tiles of so many rows. Not where Triton has its interpreter."""
    from engine.cuda import triton_product
    from tests.support.triton_builds import compiled, resources

    found = []
    for rows in all_rows:
        shape = triton_product.product_shape(*size, rows)
        tile = triton_product.row_tile(rows, shape)
        overlap = architecture >= 90
        values: dict[str, object] = triton_product.constants(*size, False, tile, shape, overlap) | {"bias": None}
        to = "*fp32" if shape.splits > 1 and not shape.joined else "*bf16"
        tensors = {"to": to, "inputs": "*bf16", "weights": "*bf16"}
        types = tensors | dict.fromkeys(("rows", "out_features", "in_features"), "i32")
        aligned = [*tensors, "out_features", "in_features"]
        options = triton_product.options(tile, shape) | triton_product.launch_options(overlap)
        kernel = compiled(triton_product.multiply, types, aligned, values, options, architecture)
        ptx = kernel.asm["ptx"]
        instructions = set(re.findall(r"(?:wgmma|mma|tcgen05\.mma)[\w.:]*\.(m\d+n\d+k\d+|kind::f16)", ptx))
        # Nothing is read or written before it is the kernel's turn.
        before, *after = ptx.split("griddepcontrol.wait;")
        assert not after or not re.search(r"ld\.global|st\.global|cp\.async", before)
        _, stack = resources(kernel.asm["cubin"])
        found.append(Build(rows, tile, stack, kernel.metadata.shared, len(after), instructions))
    return found


ALL_TILES = [1, 32, 64, 96, 128, 160, 192, 2048]
# Architecture, shared memory of a program, size of the weight, rows, and the instruction's shape.
BUILDS: list[tuple[int, int, tuple[int, int], list[int], str]] = [
    (80, 163 << 10, (4096, 4096), [1, 192, 2048], r"m16n8k16"),
    (90, 227 << 10, (4096, 4096), ALL_TILES, r"m64n\d+k16"),
    (90, 227 << 10, (24576, 4096), [1, 192], r"m64n\d+k16"),
    (100, 227 << 10, (4096, 4096), [1, 192], r"kind::f16"),
]


@pytest.mark.usefixtures("kernel")
def test_all_tiles_have_one_instruction_and_keep_their_sums_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as compiler:
        for architecture, memory, size, rows, instruction in BUILDS:
            for build in compiler.submit(builds, architecture, size, rows).result():
                assert build.stack == 0, build
                assert build.shared_memory <= memory, build
                assert build.waits == (architecture >= 90), build
                assert build.instructions, build
                assert all(re.fullmatch(instruction, found) for found in build.instructions), build
