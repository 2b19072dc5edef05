"""The kernel for GPUs, in Triton's interpreter: each row attends to what it may see, and to nothing else."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from engine.attention import Span
from engine.paged_kv import LayerKv, PagedKv
from tests.support.triton_kernel import interpreted_attention

PAGE, PAGES = 16, 40
CPU = torch.device("cpu")
# Query heads, KV heads and dimensions: one query a KV head, groups that fill a tile and that do not, sizes of no power
# of 2, and more queries a KV head than the smallest tile has rows.
SHAPES = [(2, 2, 16), (8, 2, 64), (6, 2, 8), (3, 1, 80), (20, 1, 16)]
# Start and rows: one token, verification, prefill across pages and tiles, and a lone first token.
PLACES = [(20, 1), (62, 5), (0, 40), (130, 3), (0, 1)]


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return interpreted_attention()


def filled(kv_heads: int, head_dim: int, dtype: torch.dtype) -> PagedKv:
    kv = PagedKv(1, PAGES, PAGE, kv_heads, head_dim, dtype, CPU)
    kv.layers[0].pool.copy_(torch.randn(kv.layers[0].pool.shape, generator=torch.Generator().manual_seed(1)))
    return kv


def spans() -> list[Span]:
    """Packed one after the other, each on pages of its own, which lie in no order."""
    found, row, free = [], 0, list(range(PAGES - 1, 0, -2)) + list(range(0, PAGES, 2))
    for start, rows in PLACES:
        pages = -(-(start + rows) // PAGE)
        found.append(Span(row, rows, start, free[:pages]))
        row, free = row + rows, free[pages:]
    return found


def by_hand(layer: LayerKv, query: torch.Tensor, scaling: float) -> torch.Tensor:
    """Row by row, in float64."""
    kv_heads, head_dim = layer.kv_heads, query.shape[2]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for span in spans():
        keys, values = layer.pool[:, list(span.pages)].double().transpose(1, 2).flatten(2, 3)
        for place in range(span.rows):
            seen = span.start + place + 1
            row = query[span.first_row + place].double().view(kv_heads, -1, head_dim)
            weights = torch.softmax(row @ keys[:, :seen].transpose(1, 2) * scaling, -1)
            out[span.first_row + place] = (weights @ values[:, :seen]).flatten(0, 1)
    return out


# The interpreter cannot multiply bfloat16.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 0.005)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_each_row_attends_to_what_it_sees(
    kernel: ModuleType, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    kv = filled(kv_heads, head_dim, dtype)
    rows = sum(rows for _, rows in PLACES)
    query = torch.randn(rows + 2, heads, head_dim, generator=torch.Generator().manual_seed(2)).to(dtype)
    plan = kernel.TritonBackend(heads, kv_heads, PAGE, CPU).plan(spans(), rows + 2)
    found = plan.attend(kv.layers[0], query, 0.3)
    assert torch.allclose(found.double(), by_hand(kv.layers[0], query, 0.3), atol=tolerance)
    assert not found[rows:].any()  # padding rows belong to no sequence


def test_what_lies_on_other_pages_does_not_leak_in(kernel: ModuleType) -> None:
    heads, kv_heads, head_dim = SHAPES[1]
    kv = filled(kv_heads, head_dim, torch.float32)
    query = torch.randn(5, heads, head_dim, generator=torch.Generator().manual_seed(2))
    span = Span(0, 5, 62, [7, 3, 11, 30, 2])
    backend = kernel.TritonBackend(heads, kv_heads, PAGE, CPU)
    before = backend.plan([span], 5).attend(kv.layers[0], query, 0.3)
    pool = kv.layers[0].pool
    pool[:, [page for page in range(kv.pages) if page not in span.pages]] = float("nan")
    pool[:, 2, :, 67 - 64 :] = float("nan")
    assert torch.equal(backend.plan([span], 5).attend(kv.layers[0], query, 0.3), before)


def test_bits_of_a_row_do_not_depend_on_what_shares_its_call(kernel: ModuleType) -> None:
    heads, kv_heads, head_dim = SHAPES[1]
    kv = filled(kv_heads, head_dim, torch.float32)
    rows = sum(rows for _, rows in PLACES)
    query = torch.randn(rows, heads, head_dim, generator=torch.Generator().manual_seed(2))
    backend = kernel.TritonBackend(heads, kv_heads, PAGE, CPU)
    together = backend.plan(spans(), rows).attend(kv.layers[0], query, 0.3)
    for span in spans():
        for place in range(span.rows):
            row = slice(span.first_row + place, span.first_row + place + 1)
            alone = backend.plan([Span(0, 1, span.start + place, span.pages)], 1)
            assert torch.equal(alone.attend(kv.layers[0], query[row], 0.3), together[row])
