"""Which sequences share a call of matrix products, and that it does not matter to the attention of each."""

from __future__ import annotations

import pytest
import torch

from engine.attention.backends import AttentionForm, MatmulBackend, Span
from engine.kv.paged_kv import PagedKv

PAGE, PAGES, HEADS, KV_HEADS, DIM = 8, 96, 4, 2, 16
LENGTHS = (32, 64, 128, 256)


@pytest.fixture
def kv() -> PagedKv:
    kv = PagedKv(1, PAGES, PAGE, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
    kv.layers[0].pool.copy_(torch.randn(kv.layers[0].pool.shape, generator=torch.Generator().manual_seed(1)))
    return kv


def backend(kv: PagedKv) -> MatmulBackend:
    return MatmulBackend(AttentionForm(LENGTHS), HEADS, KV_HEADS, PAGE, kv.pages, torch.float32, torch.device("cpu"))


def spans(*places: tuple[int, int]) -> list[Span]:
    """Of (start, rows), one after the other, each sequence on pages of its own."""
    found, row, page = [], 0, 0
    for start, rows in places:
        pages = -(-(start + rows) // PAGE)
        found.append(Span(row, rows, start, range(page, page + pages)))
        row, page = row + rows, page + pages
    return found


def test_the_output_is_the_attention_of_each_sequence(kv: PagedKv) -> None:
    batch = spans((20, 2), (30, 4), (100, 2), (5, 20))
    rows = sum(span.rows for span in batch)
    query = torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    layer = kv.layers[0]
    together = backend(kv).plan(batch, rows).attend(layer, query, 0.25)
    for span in batch:
        alone = Span(0, span.rows, span.start, span.pages)
        part = query[span.first_row : span.first_row + span.rows]
        expected = backend(kv).plan([alone], span.rows).attend(layer, part, 0.25)
        assert torch.allclose(together[span.first_row : span.first_row + span.rows], expected, atol=1e-6)


def test_kv_length_of_a_call_depends_on_the_position_alone() -> None:
    form = AttentionForm((16, 32, 64), 4)
    assert [form.kv_length(n) for n in (1, 16, 17, 32, 33, 64, 65, 128, 129)] == [16, 16, 32, 32, 64, 64, 128, 128, 192]
