"""The matrix product for GPUs, in Triton's interpreter: right values, and bits that do not depend on the company."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

from tests.support.triton_kernel import interpreted, multiply_in_one_order

# Outputs and inner dimensions: in one part, two and four, of whole blocks and not.
ONE_PART, EVEN, UNEVEN, FOUR_PARTS = (72, 80), (64, 512), (72, 528), (64, 1056)
# A tile of each size, and several tiles.
ROW_COUNTS = [1, 17, 64, 65, 161, 200]
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


@pytest.mark.parametrize(
    ("dtype", "size", "has_bias"),
    [
        (torch.float16, ONE_PART, True),
        (torch.float16, EVEN, False),
        (torch.bfloat16, UNEVEN, True),
        (torch.float16, FOUR_PARTS, True),
    ],
)
def test_products_are_those_of_torch_and_a_row_has_its_bits_in_any_call(
    kernel: ModuleType, dtype: torch.dtype, size: tuple[int, int], has_bias: bool
) -> None:
    inputs, weight, some_bias = operands(max(ROW_COUNTS), size, dtype)
    bias = some_bias if has_bias else None
    whole = kernel.product(inputs, weight, bias)
    expected = nn.functional.linear(inputs.float(), weight.float(), None if bias is None else bias.float())
    assert whole.dtype == dtype
    assert torch.allclose(whole.float(), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])
    for rows in ROW_COUNTS[:-1]:
        assert torch.equal(kernel.product(inputs[:rows], weight, bias), whole[:rows])
        # At another place of a tile.
        assert torch.equal(kernel.product(inputs[-rows:], weight, bias), whole[-rows:])


@pytest.mark.parametrize(
    ("size", "rows", "count"), [(ONE_PART, 5, 1), (UNEVEN, 5, 2), (FOUR_PARTS, 5, 4), (FOUR_PARTS, 193, 1)]
)
def test_parts_add_up_to_the_product(kernel: ModuleType, size: tuple[int, int], rows: int, count: int) -> None:
    inputs, weight, bias = operands(rows, size)
    sums, rest_of_bias = kernel.product_parts(inputs, weight, bias)
    assert len(sums) == count
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    if rest_of_bias is not None:
        total = total + rest_of_bias.float()
    assert torch.equal(total.half(), kernel.product(inputs, weight, bias))


def test_a_layer_takes_rows_in_any_arrangement(kernel: ModuleType) -> None:
    linear = nn.Linear(96, 40, dtype=torch.float16)
    layer = kernel.TritonLinear(linear)
    rows = torch.randn(96, 3, 2, generator=torch.Generator().manual_seed(1)).half().permute(1, 2, 0)
    expected = nn.functional.linear(rows.float(), linear.weight.float(), linear.bias.float())
    assert (layer.in_features, layer.out_features) == (96, 40)
    assert torch.allclose(layer(rows).float(), expected, rtol=2e-3, atol=2e-3)
    assert layer(rows[:0]).shape == (0, 2, 40)


def test_other_rows_of_a_call_do_not_leak_in(kernel: ModuleType) -> None:
    inputs, weight, bias = operands(40, UNEVEN)
    before = kernel.product(inputs, weight, bias)
    inputs[7:] = float("nan")
    assert torch.equal(kernel.product(inputs, weight, bias)[:7], before[:7])


def test_blocks_and_parts_of_the_inner_dimension_do_not_depend_on_rows(kernel: ModuleType) -> None:
    for size in [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096), (1024, 2048), (40, 64)]:
        shapes = [kernel.product_shape(*size, rows) for rows in (1, 32, 64, 65, 192, 193, 5000)]
        assert len({(shape.block_in, shape.splits) for shape in shapes}) == 1
