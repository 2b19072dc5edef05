"""A library multiplies in the place of Spool's product where it gives its bits, and nowhere else."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

from tests.support.triton_kernel import interpreted, multiply_in_one_order

ROW_COUNTS = (1, 64, 66, 80, 96)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    multiply_in_one_order(monkeypatch)
    interpreted("spool.engine.cuda.library_products")
    return interpreted("spool.engine.cuda.triton_product")


class Library:
    """Sums in the order of Spool's product, or with the second half of the terms first; counts its calls."""

    def __init__(self, products: ModuleType, in_order: bool = True, other: int = 0) -> None:
        self.rows: list[int] = []
        self._product, self._in_order, self._other = products.product, in_order, other

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.rows.append(len(rows))
        if not self._in_order or len(rows) == self._other:
            rows, weight = rows.roll(rows.shape[1] // 2, 1), weight.roll(rows.shape[1] // 2, 1)
        found: torch.Tensor = self._product(rows, weight, bias)
        return found


def model(products: ModuleType, bias: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList([products.TritonLinear(nn.Linear(128, 64, bias).half()) for _ in range(2)])


@pytest.mark.parametrize("bias", [False, True])
def test_a_library_of_the_same_bits_multiplies_many_rows(products: ModuleType, bias: bool) -> None:
    from spool.engine.cuda.library_products import use_library

    layers, library = model(products, bias), Library(products)
    rows = torch.randn(96, 128).half()
    own = [layer(rows) for layer in layers]
    assert use_library(layers, ROW_COUNTS, library) == 3
    library.rows.clear()
    for count in (1, 64, 66, 70, 96):
        for layer, expected in zip(layers, own, strict=True):
            assert torch.equal(layer(rows[:count]), expected[:count])
            (sums,), rest = layer.partial(rows[:count])
            assert torch.equal(sums, expected[:count])
            assert rest is None
    # Not where it is as slow, nor where it was not tried.
    assert set(library.rows) == {66, 96}


def test_a_library_of_other_bits_is_not_used(products: ModuleType) -> None:
    from spool.engine.cuda.library_products import use_library

    rows = torch.randn(96, 128).half()
    for library, used in ((Library(products, in_order=False), []), (Library(products, other=96), [66, 80])):
        layers = model(products, bias=False)
        assert use_library(layers, ROW_COUNTS, library) == len(used)
        library.rows.clear()
        for count in (66, 80, 96):
            layers[0](rows[:count])
        assert library.rows == used
