"""The GPU kernel of attention, in the interpreter: each row attends to what it may see, whatever its company."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from spool.engine.attention.backends import AttentionRule, Span
from spool.engine.kv.paged_kv import PagedKv
from tests.support.reference_attention import attended
from tests.support.triton_kernel import interpreted_attention, multiply_in_one_order

CPU = torch.device("cpu")
# Positions of the pool, and its pages' sizes.
POSITIONS = 3072
PAGE_SIZES = (16, 32)
# Query heads, KV heads and dimensions: one query a KV head, groups that do not fill a tile, sizes of no power of 2, the
# longest heads, and more queries a KV head than a tile has rows.
SHAPES = [(2, 2, 16), (6, 2, 8), (3, 1, 80), (7, 1, 128), (8, 1, 256), (20, 1, 16), (18, 1, 32)]
# Start and rows: one token, verification, prefill across pages and tiles, a lone first token, and contexts of several
# splits, one of which a block's first row does not see.
PLACES = [(20, 1), (62, 5), (0, 18), (0, 1), (1088, 1), (255, 2)]
# Rows of one sequence on each side of where a split begins.
BORDERS = [(254, 4), (510, 4)]
PLAIN = AttentionRule(0.3)
# Windows that begin before and after a tile and a split, and reach over several.
RULES = [PLAIN, AttentionRule(0.3, 1), AttentionRule(0.3, 19), AttentionRule(0.3, 300), AttentionRule(0.3, softcap=2.0)]


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return interpreted_attention()


@pytest.fixture
def _fixed_order(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_in_one_order(monkeypatch)


def filled(
    kv_heads: int, head_dim: int, dtype: torch.dtype, page_size: int = PAGE_SIZES[0], quantized: bool = False
) -> PagedKv:
    kv = PagedKv(1, POSITIONS // page_size, page_size, kv_heads, head_dim, dtype, CPU, quantized)
    shape = (2, kv.pages, kv_heads, page_size, head_dim)
    kv.layers[0].fill(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
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


KINDS = [
    (torch.float32, False, 16, 1e-5),
    (torch.float16, False, 32, 0.005),
    (torch.float16, True, 32, 0.005),
    (torch.bfloat16, False, 16, 0.03),
    (torch.bfloat16, True, 16, 0.03),
]


@pytest.mark.usefixtures("_fixed_order")
@pytest.mark.sampled(3)  # of five kinds and seven shapes: all of them
@pytest.mark.parametrize(("dtype", "quantized", "page_size", "tolerance"), KINDS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_each_row_attends_to_what_it_sees(
    kernel: ModuleType,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    quantized: bool,
    page_size: int,
    tolerance: float,
) -> None:
    kv = filled(kv_heads, head_dim, dtype, page_size, quantized)
    batch = spans(page_size=page_size)
    rows = sum(rows for _, rows in PLACES)
    query = random_query(rows + 2, heads, head_dim).to(dtype)
    plan = kernel.TritonBackend(heads, kv_heads, page_size, CPU).plan(batch, rows + 2)
    # The layers of a pass, whose plan leaves nothing of one to the next.
    sinks = random_query(heads, 1, 1).flatten() * 3
    for rule in (PLAIN, AttentionRule(0.1, 300, 2.0, sinks), AttentionRule(0.1, sinks=sinks)):
        found = plan.attend(kv.layers[0], query, rule)
        assert torch.allclose(found.double(), attended(kv.layers[0], query, rule, batch), atol=tolerance)
        assert not found[rows:].any()  # padding rows belong to no sequence


@pytest.mark.parametrize(
    "rows", [1, 2, 5, 8, 16, 17, 40, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (64, 160))]
)
def test_passes_may_have_any_number_of_rows(kernel: ModuleType, rows: int) -> None:
    """One sequence that feeds them all, and as many that feed one each, with contexts up to two splits."""
    kv, query = filled(1, 32, torch.float32), random_query(rows, 4, 32)
    pages = [number * 7 % POSITIONS // PAGE_SIZES[0] for number in range(2 * 256 // PAGE_SIZES[0])]
    one_each = [Span(row, 1, row * 509 // 160, pages) for row in range(rows)]
    for batch in ([Span(0, rows, 200, pages)], one_each):
        found = kernel.TritonBackend(4, 1, PAGE_SIZES[0], CPU).plan(batch, rows).attend(kv.layers[0], query, PLAIN)
        assert torch.allclose(found.double(), attended(kv.layers[0], query, PLAIN, batch), atol=1e-5)


@pytest.mark.parametrize("quantized", [False, True], ids=["elements", "codes"])
def test_what_lies_on_other_pages_does_not_leak_in(kernel: ModuleType, quantized: bool) -> None:
    heads, kv_heads, head_dim = 8, 2, 64
    kv = filled(kv_heads, head_dim, torch.float32, quantized=quantized)
    query = random_query(5, heads, head_dim)
    backend = kernel.TritonBackend(heads, kv_heads, PAGE_SIZES[0], CPU)
    pool = kv.layers[0].parts[-1]
    for span in (Span(0, 5, 62, [7, 3, 11, 30, 2]), Span(0, 5, 254, [*range(40, 56), 2])):
        content = pool.clone()
        before = backend.plan([span], 5).attend(kv.layers[0], query, PLAIN)
        pool[:, [page for page in range(kv.pages) if page not in span.pages]] = float("nan")
        pool[:, 2, :, (span.start + 5) % PAGE_SIZES[0] :] = float("nan")
        assert torch.equal(backend.plan([span], 5).attend(kv.layers[0], query, PLAIN), before)
        pool.copy_(content)


HEADS, KV_HEADS, HEAD_DIM = 3, 1, 8
COMPANIES = [[(20, 1), (62, 5), (0, 8), (130, 1), (0, 1)], [*BORDERS[::-1], (700, 1), (5, 2)]]


@pytest.mark.usefixtures("_fixed_order")
@pytest.mark.parametrize(("rule", "quantized"), [*((rule, False) for rule in RULES), (RULES[2], True)], ids=str)
@pytest.mark.parametrize("places", COMPANIES)
def test_bits_of_a_row_do_not_depend_on_its_company(
    kernel: ModuleType, places: list[tuple[int, int]], rule: AttentionRule, quantized: bool
) -> None:
    kv = filled(KV_HEADS, HEAD_DIM, torch.float32, quantized=quantized)
    query = random_query(sum(rows for _, rows in places), HEADS, HEAD_DIM)
    backend = kernel.TritonBackend(HEADS, KV_HEADS, PAGE_SIZES[0], CPU)
    together = backend.plan(spans(places), len(query)).attend(kv.layers[0], query, rule)
    for span in spans(places):
        for place in range(span.rows):
            row = span.first_row + place
            alone = backend.plan([Span(0, 1, span.start + place, span.pages)], 1)
            assert torch.equal(alone.attend(kv.layers[0], query[row : row + 1], rule)[0], together[row])


@pytest.mark.usefixtures("_fixed_order")
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_bits_of_a_row_do_not_depend_on_whether_its_block_is_split(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, rule: AttentionRule
) -> None:
    """The same pass with room for the sums of all splits, of some, and of none."""
    kv, query = filled(KV_HEADS, HEAD_DIM, torch.float32), random_query(6, HEADS, HEAD_DIM)
    batch = spans([(254, 3), (511, 2), (1100, 1)])
    found = []
    for kept_splits in (1000, 5, 0):
        monkeypatch.setattr(kernel, "KEPT_ROWS", kept_splits * 16 * KV_HEADS)
        plan = kernel.TritonBackend(HEADS, KV_HEADS, PAGE_SIZES[0], CPU).plan(batch, 6)
        found.append(plan.attend(kv.layers[0], query, rule))
    split, some, whole = found
    assert torch.equal(split, some)
    assert torch.equal(split, whole)


@pytest.mark.usefixtures("_fixed_order")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.005), (torch.bfloat16, 0.03)], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 1, 80), (8, 2, 16), (1, 1, 32), (16, 1, 16)])
def test_bits_of_a_row_do_not_depend_on_its_tile(
    kernel: ModuleType, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    """The same pass in tiles of one block, and of several where a sequence fills them; whole numbers of them or not."""
    # What fills a tile of several blocks: 64 query heads that share a KV head.
    full = 64 * kv_heads // heads
    kv, batch = filled(kv_heads, head_dim, dtype), spans([(230, full + 6), (20, 1), (0, 2 * full + 2), (500, full)])
    rows = 4 * full + 9
    query = random_query(rows, heads, head_dim).to(dtype)
    narrow, wide = (
        kernel.TritonBackend(heads, kv_heads, PAGE_SIZES[0], CPU, wide_from=wide_from)
        for wide_from in (float("inf"), 0.0)
    )
    expected = narrow.plan(batch, rows).attend(kv.layers[0], query, PLAIN)
    assert torch.equal(wide.plan(batch, rows).attend(kv.layers[0], query, PLAIN), expected)
    assert torch.allclose(expected.double(), attended(kv.layers[0], query, PLAIN, batch), atol=tolerance)
