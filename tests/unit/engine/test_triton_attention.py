"""The kernel for GPUs, in Triton's interpreter: each row attends to what it may see, and to nothing else."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.attention.backends import Span
from engine.kv.paged_kv import LayerKv, PagedKv
from tests.support.triton_kernel import interpreted_attention

PAGE, PAGES = 16, 40
CPU = torch.device("cpu")
# Query heads, KV heads and dimensions: one query a KV head, groups that fill a tile and that do not, sizes of no power
# of 2, and more queries a KV head than the smallest tile has rows.
SHAPES = [(2, 2, 16), (8, 2, 64), (6, 2, 8), (3, 1, 80), (20, 1, 16)]
# Start and rows: one token, verification, prefill across pages and tiles, and a lone first token.
PLACES = [(20, 1), (62, 5), (0, 40), (130, 3), (0, 1)]
# The same with less prefill, for what computes each row by itself too.
SHORT_PLACES = [(20, 1), (62, 5), (0, 12), (130, 3), (0, 1)]


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return interpreted_attention()


def filled(kv_heads: int, head_dim: int, dtype: torch.dtype) -> PagedKv:
    kv = PagedKv(1, PAGES, PAGE, kv_heads, head_dim, dtype, CPU)
    kv.layers[0].pool.copy_(torch.randn(kv.layers[0].pool.shape, generator=torch.Generator().manual_seed(1)))
    return kv


def spans(places: list[tuple[int, int]] = PLACES) -> list[Span]:
    """One after the other, each on pages of its own, which lie in no order."""
    found, row, free = [], 0, list(range(PAGES - 1, 0, -2)) + list(range(0, PAGES, 2))
    for start, rows in places:
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


@pytest.fixture
def _fixed_order(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the interpreter's products one order of sums, as a GPU's matrix units have.

    The interpreter itself multiplies with numpy, whose BLAS adds up some rows of a tile in another order than others on
    some processors.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")

    def create_dot(_: object, a: Any, b: Any, d: Any, input_precision: object, max_num_imprecise_acc: object) -> Any:
        sums = d.data
        for inner in range(a.data.shape[1]):
            sums = sums + a.data[:, inner, None] * b.data[None, inner, :]
        return interpreter.TensorHandle(sums, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def rows_with_other_bits(kernel: ModuleType) -> list[int]:
    """The rows of a pass over `SHORT_PLACES` whose output is not that of the same row in a call of its own."""
    heads, kv_heads, head_dim = SHAPES[2]
    kv = filled(kv_heads, head_dim, torch.float32)
    rows = sum(rows for _, rows in SHORT_PLACES)
    query = torch.randn(rows, heads, head_dim, generator=torch.Generator().manual_seed(2))
    backend = kernel.TritonBackend(heads, kv_heads, PAGE, CPU)
    together = backend.plan(spans(SHORT_PLACES), rows).attend(kv.layers[0], query, 0.3)
    found = []
    for span in spans(SHORT_PLACES):
        for place in range(span.rows):
            row = span.first_row + place
            exclusive = backend.plan([Span(0, 1, span.start + place, span.pages)], 1)
            if not torch.equal(exclusive.attend(kv.layers[0], query[row : row + 1], 0.3)[0], together[row]):
                found.append(row)
    return found


@pytest.mark.usefixtures("_fixed_order")
def test_bits_of_a_row_do_not_depend_on_what_shares_its_call(kernel: ModuleType) -> None:
    assert rows_with_other_bits(kernel) == []


# The highest score of all rows of a tile instead of each row's own, and smaller tiles for a call of one sequence.
FAULTS = {
    "rows of a tile share a maximum": ("tl.max(scores, 1))", "tl.max(scores))"),
    "tiles depend on the number of sequences": (
        "**self._constants,",
        "**(self._constants | {'tile_positions': 64 if len(self._edges) > 1 else 16}),",
    ),
}


@pytest.mark.usefixtures("_fixed_order")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_whose_rows_depend_on_their_company_is_seen(kernel: ModuleType, fault: str, tmp_path: Path) -> None:
    right, wrong = FAULTS[fault]
    source = Path(str(kernel.__file__)).read_text(encoding="utf-8")
    assert source.count(right) == 1
    file = tmp_path / "faulty_attention.py"
    file.write_text(source.replace(right, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("faulty_attention", file)
    assert spec is not None
    assert spec.loader is not None
    faulty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faulty)
    assert rows_with_other_bits(faulty)
