"""The matrix product for GPUs, in Triton's interpreter: right values, and bits that do not depend on the company."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

from spool.engine.quantization.weights import QuantizedWeight
from tests.support.triton_kernel import interpreted, multiply_in_one_order

# Outputs and inner dimensions: in one part, two and four, of whole blocks and not.
ONE_PART, EVEN, UNEVEN, FOUR_PARTS = (72, 80), (64, 512), (72, 528), (64, 1056)
# A tile of each size, and several tiles.
ROW_COUNTS = [1, 17, 64, 65, 161, 200]
DTYPES = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = interpreted("spool.engine.cuda.triton_product")
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
    ("bits", "group", "words", "dtype", "size"),
    [
        (4, 16, False, torch.bfloat16, (40, 544)),
        (4, 32, True, torch.bfloat16, FOUR_PARTS),
        (8, 16, True, torch.float16, (72, 96)),
        (8, 32, False, torch.bfloat16, (136, 160)),
    ],
)
def test_products_of_codes_have_the_bits_of_those_of_the_expanded_weight(
    kernel: ModuleType, bits: int, group: int, words: bool, dtype: torch.dtype, size: tuple[int, int]
) -> None:
    inputs, _, bias = operands(512, size, dtype)
    out_features, in_features = size
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(2**bits, size, generator=generator).to(torch.uint8)
    # Not numbers of 16 bits, so that products and sums are rounded.
    scales, minimums = torch.randn(2, out_features, in_features // group, generator=generator) * 2**-bits
    weight = QuantizedWeight.of_codes(codes, scales, minimums, bits, group)
    expected = kernel.product(inputs, weight.expanded().to(dtype), bias)
    for rows in (1, 17, 65, 161, 512):
        assert torch.equal(kernel.product(inputs[:rows], weight, bias, words), expected[:rows])


def test_other_rows_of_a_call_do_not_leak_in(kernel: ModuleType) -> None:
    inputs, weight, bias = operands(40, UNEVEN)
    before = kernel.product(inputs, weight, bias)
    inputs[7:] = float("nan")
    assert torch.equal(kernel.product(inputs, weight, bias)[:7], before[:7])


@pytest.mark.parametrize("shared_memory", [64 << 10, 99 << 10, 227 << 10])
def test_bits_do_not_depend_on_the_shared_memory_of_a_device(kernel: ModuleType, shared_memory: int) -> None:
    """Which decides how many rows a tile has."""
    inputs, weight, bias = operands(200, EVEN)
    assert torch.equal(
        kernel.product(inputs, weight, bias, shared_memory=shared_memory), kernel.product(inputs, weight, bias)
    )
