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

CPU = torch.device("cpu")
# Positions of the pool, and its pages' sizes.
POSITIONS = 3072
PAGE_SIZES = (16, 32)
SPLIT = 256
# Query heads, KV heads and dimensions: one query a KV head, groups that fill a tile and that do not, sizes of no power
# of 2, and more queries a KV head than the smallest tile has rows.
SHAPES = [(2, 2, 16), (4, 2, 32), (8, 2, 64), (8, 1, 16), (6, 2, 8), (3, 1, 80), (20, 1, 16)]
# Start and rows: one token, verification, prefill across pages and tiles, a lone first token, and contexts of several
# splits, one of which a block's first row does not see.
PLACES = [(20, 1), (62, 5), (0, 18), (0, 1), (1088, 1), (255, 2)]
# Rows of one sequence on each side of where a split begins.
BORDERS = [(254, 4), (510, 4)]


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return interpreted_attention()


def filled(kv_heads: int, head_dim: int, dtype: torch.dtype, page_size: int = PAGE_SIZES[0]) -> PagedKv:
    kv = PagedKv(1, POSITIONS // page_size, page_size, kv_heads, head_dim, dtype, CPU)
    kv.layers[0].pool.copy_(torch.randn(kv.layers[0].pool.shape, generator=torch.Generator().manual_seed(1)))
    return kv


def random_query(rows: int, heads: int, head_dim: int) -> torch.Tensor:
    return torch.randn(rows, heads, head_dim, generator=torch.Generator().manual_seed(2))


def spans(places: list[tuple[int, int]] = PLACES, page_size: int = PAGE_SIZES[0]) -> list[Span]:
    """One after the other, each on pages of its own, which lie in no order."""
    pages = POSITIONS // page_size
    found, row, free = [], 0, list(range(pages - 1, 0, -2)) + list(range(0, pages, 2))
    for start, rows in places:
        count = -(-(start + rows) // page_size)
        found.append(Span(row, rows, start, free[:count]))
        row, free = row + rows, free[count:]
    return found


def by_hand(layer: LayerKv, query: torch.Tensor, scaling: float, batch: list[Span]) -> torch.Tensor:
    """Row by row, in float64."""
    kv_heads, head_dim = layer.kv_heads, query.shape[2]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for span in batch:
        keys, values = layer.pool[:, list(span.pages)].double().transpose(1, 2).flatten(2, 3)
        for place in range(span.rows):
            seen = span.start + place + 1
            row = query[span.first_row + place].double().view(kv_heads, -1, head_dim)
            weights = torch.softmax(row @ keys[:, :seen].transpose(1, 2) * scaling, -1)
            out[span.first_row + place] = (weights @ values[:, :seen]).flatten(0, 1)
    return out


# The interpreter cannot multiply bfloat16.
@pytest.mark.parametrize(("dtype", "page_size", "tolerance"), [(torch.float32, 16, 1e-5), (torch.float16, 32, 0.005)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_each_row_attends_to_what_it_sees(
    kernel: ModuleType,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    kv = filled(kv_heads, head_dim, dtype, page_size)
    batch = spans(page_size=page_size)
    rows = sum(rows for _, rows in PLACES)
    query = random_query(rows + 2, heads, head_dim).to(dtype)
    plan = kernel.TritonBackend(heads, kv_heads, page_size, CPU).plan(batch, rows + 2)
    found = plan.attend(kv.layers[0], query, 0.3)
    assert torch.allclose(found.double(), by_hand(kv.layers[0], query, 0.3, batch), atol=tolerance)
    assert not found[rows:].any()  # padding rows belong to no sequence


def test_a_layer_leaves_nothing_that_the_next_one_sees(kernel: ModuleType) -> None:
    kv, query, batch = filled(1, 16, torch.float32), random_query(3, 2, 16), spans([(600, 1), (255, 2)])
    plan = kernel.TritonBackend(2, 1, PAGE_SIZES[0], CPU).plan(batch, 3)
    for factor in (0.3, 0.2, 0.1):
        expected = by_hand(kv.layers[0], query, factor, batch)
        assert torch.allclose(plan.attend(kv.layers[0], query, factor).double(), expected, atol=1e-5)


def test_what_lies_on_other_pages_does_not_leak_in(kernel: ModuleType) -> None:
    heads, kv_heads, head_dim = 8, 2, 64
    kv = filled(kv_heads, head_dim, torch.float32)
    query = random_query(5, heads, head_dim)
    for span in (Span(0, 5, 62, [7, 3, 11, 30, 2]), Span(0, 5, 254, [*range(40, 56), 2])):
        backend = kernel.TritonBackend(heads, kv_heads, PAGE_SIZES[0], CPU)
        pool = kv.layers[0].pool.clone()
        before = backend.plan([span], 5).attend(kv.layers[0], query, 0.3)
        kv.layers[0].pool[:, [page for page in range(kv.pages) if page not in span.pages]] = float("nan")
        kv.layers[0].pool[:, 2, :, (span.start + 5) % PAGE_SIZES[0] :] = float("nan")
        assert torch.equal(backend.plan([span], 5).attend(kv.layers[0], query, 0.3), before)
        kv.layers[0].pool.copy_(pool)


def expected_items(batch: list[Span], block_rows: int, kept_splits: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Pages, and items of work in any order; where sums are kept left out, and all splits in one as split None."""
    pages: list[int] = []
    blocks = []
    for span in batch:
        for done in range(0, span.rows, block_rows):
            rows = min(block_rows, span.rows - done)
            blocks.append((span.first_row + done, rows, span.start + done, len(pages)))
        pages += list(span.pages)
    items: list[tuple[int, ...]] = []
    for block in sorted(blocks, key=lambda block: block[1] + block[2], reverse=True):
        splits = (block[1] + block[2] + SPLIT - 1) // SPLIT
        if 1 < splits <= kept_splits:
            items += [(*block, split) for split in range(splits)]
            kept_splits -= splits
        else:
            items.append((*block, -1))
    return pages, items


@pytest.mark.parametrize("kept_splits", [0, 4, 1000])
def test_work_is_cut_at_fixed_positions(kernel: ModuleType, kept_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, kv_heads = 8, 2
    monkeypatch.setattr(kernel, "KEPT_ROWS", kept_splits * 16 * kv_heads)
    backend = kernel.TritonBackend(heads, kv_heads, PAGE_SIZES[0], CPU)
    batch = spans()
    (count,), numbers = backend.blocks(batch)
    pages, items = expected_items(batch, 4, kept_splits)
    assert numbers[6 * count :] == pages
    found = [tuple(numbers[at : at + 6]) for at in range(0, 6 * count, 6)]
    # Places of pages are those among all numbers.
    unplaced = [(*item[:3], item[3] - 6 * count, item[4] if item[5] >= 0 else -1) for item in found]
    assert sorted(unplaced) == sorted(items)
    # Each split of each block has a place of its own.
    places = [item[4] + item[5] for item in found if item[5] >= 0]
    assert sorted(places) == list(range(len(places)))
    assert len(places) <= kept_splits


def test_there_is_room_for_any_pass(kernel: ModuleType) -> None:
    backend = kernel.TritonBackend(8, 8, 16, CPU)
    longest = Span(0, 160, 16 * 4000 - 160, range(4000))
    for batch in ([longest], [Span(row, 1, 399, range(25 * row, 25 * row + 25)) for row in range(160)]):
        edges, pages = backend.blocks(batch)
        assert len(edges) == backend.edge_numbers(160, 4000)
        assert len(pages) <= backend.page_numbers(160, 4000)


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


HEADS, KV_HEADS, HEAD_DIM = 3, 1, 8
COMPANIES = [[(20, 1), (62, 5), (0, 8), (130, 1), (0, 1)], BORDERS, [*BORDERS[::-1], (700, 1), (5, 2)]]


def computed(backend: Any, batch: list[Span], kv: PagedKv, query: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = backend.plan(batch, len(query)).attend(kv.layers[0], query, 0.3)
    return found


def rows_with_other_bits(kernel: ModuleType, places: list[tuple[int, int]]) -> list[int]:
    """The rows of a pass whose output is not that of the same row in a call of its own."""
    kv = filled(KV_HEADS, HEAD_DIM, torch.float32)
    query = random_query(sum(rows for _, rows in places), HEADS, HEAD_DIM)
    backend = kernel.TritonBackend(HEADS, KV_HEADS, PAGE_SIZES[0], CPU)
    together = computed(backend, spans(places), kv, query)
    found = []
    for span in spans(places):
        for place in range(span.rows):
            row = span.first_row + place
            alone = Span(0, 1, span.start + place, span.pages)
            if not torch.equal(computed(backend, [alone], kv, query[row : row + 1])[0], together[row]):
                found.append(row)
    return found


@pytest.mark.usefixtures("_fixed_order")
@pytest.mark.parametrize("places", COMPANIES)
def test_bits_of_a_row_do_not_depend_on_what_shares_its_call(kernel: ModuleType, places: list[tuple[int, int]]) -> None:
    assert rows_with_other_bits(kernel, places) == []


def rows_with_other_bits_unsplit(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many outputs change where there is room for the sums of no split, or of some."""
    kv, query = filled(KV_HEADS, HEAD_DIM, torch.float32), random_query(6, HEADS, HEAD_DIM)
    batch = spans([(254, 3), (511, 2), (1100, 1)])
    found = []
    for kept_splits in (1000, 5, 0):
        monkeypatch.setattr(kernel, "KEPT_ROWS", kept_splits * 16 * KV_HEADS)
        found.append(computed(kernel.TritonBackend(HEADS, KV_HEADS, PAGE_SIZES[0], CPU), batch, kv, query))
    return sum(not torch.equal(found[0][row], other[row]) for other in found[1:] for row in range(6))


@pytest.mark.usefixtures("_fixed_order")
def test_bits_of_a_row_do_not_depend_on_whether_its_block_is_split(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rows_with_other_bits_unsplit(kernel, monkeypatch) == 0


@pytest.mark.usefixtures("_fixed_order")
def test_bits_do_not_depend_on_the_order_of_the_work_nor_on_what_follows_it(kernel: ModuleType) -> None:
    kv, query = filled(KV_HEADS, HEAD_DIM, torch.float32), random_query(6, HEADS, HEAD_DIM)
    batch = spans([(254, 3), (511, 2), (1100, 1)])
    backend = kernel.TritonBackend(HEADS, KV_HEADS, PAGE_SIZES[0], CPU)
    (count,), numbers = backend.blocks(batch)
    items = [numbers[at : at + 6] for at in range(0, 6 * count, 6)]
    right = computed(backend, batch, kv, query)
    for order in (items, items[::-1]):
        given = [number for item in order for number in item] + numbers[6 * count :]
        # A graph has zeros after the work, or what an earlier pass has left.
        tail = [0] if order is items else items[0]
        given += tail * backend.page_numbers(6, POSITIONS // PAGE_SIZES[0])
        plan = backend.plan_of(torch.tensor([count]), torch.tensor(given))
        assert torch.equal(plan.attend(kv.layers[0], query, 0.3), right)


@pytest.mark.usefixtures("_fixed_order")
def test_a_pass_of_no_work_leaves_zeros(kernel: ModuleType) -> None:
    kv, query = filled(KV_HEADS, HEAD_DIM, torch.float32), random_query(2, HEADS, HEAD_DIM)
    backend = kernel.TritonBackend(HEADS, KV_HEADS, PAGE_SIZES[0], CPU)
    for left in (0, 7):
        numbers = torch.full([backend.page_numbers(2, kv.pages)], left)
        assert not backend.plan_of(torch.tensor([0]), numbers).attend(kv.layers[0], query, 0.3).any()


@pytest.mark.usefixtures("_fixed_order")
def test_bits_depend_neither_on_how_many_programs_there_are_nor_on_what_is_loaded_ahead(kernel: ModuleType) -> None:
    kv, query = filled(KV_HEADS, HEAD_DIM, torch.float32), random_query(6, HEADS, HEAD_DIM)
    batch = spans([(254, 3), (511, 2), (1100, 1)])
    found = [
        computed(kernel.TritonBackend(HEADS, KV_HEADS, PAGE_SIZES[0], CPU, tuning), batch, kv, query)
        for tuning in (
            kernel.AttentionTuning(),
            kernel.AttentionTuning(programs=1, stages=3),
            kernel.AttentionTuning(programs=40, registers=255),
        )
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# The highest score of all rows of a tile instead of each row's own, and smaller tiles for a call of one item.
FAULTS = {
    "rows of a tile share a maximum": ("tl.max(scores, 1))", "tl.max(scores))"),
    "tiles depend on the number of items": (
        "**self._constants,",
        "**(self._constants | {'tile_positions': 64 if self._programs > 1 else 16}),",
    ),
}


@pytest.mark.usefixtures("_fixed_order")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_whose_rows_depend_on_their_company_is_seen(kernel: ModuleType, fault: str, tmp_path: Path) -> None:
    faulty = changed(kernel, *FAULTS[fault], tmp_path)
    assert rows_with_other_bits(faulty, COMPANIES[0])


@pytest.mark.usefixtures("_fixed_order")
def test_a_kernel_that_merges_splits_only_where_they_are_kept_is_seen(
    kernel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = "if first % split_positions == 0:"
    faulty = changed(kernel, right, "if (first % split_positions == 0) & (first_kept >= 0):", tmp_path)
    assert rows_with_other_bits_unsplit(faulty, monkeypatch)


def changed(kernel: ModuleType, right: str, wrong: str, tmp_path: Path) -> ModuleType:
    """The kernel with something else in the place of what is right."""
    source = Path(str(kernel.__file__)).read_text(encoding="utf-8")
    assert source.count(right) == 1
    file = tmp_path / "faulty_attention.py"
    file.write_text(source.replace(right, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("faulty_attention", file)
    assert spec is not None
    assert spec.loader is not None
    faulty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faulty)
    return faulty
