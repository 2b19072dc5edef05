"""Which sequences share an attention call, and that it does not matter to what comes out."""

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


def backend(kv: PagedKv, longest_padded: int) -> MatmulBackend:
    form = AttentionForm(LENGTHS, longest_padded=longest_padded)
    return MatmulBackend(form, HEADS, KV_HEADS, PAGE, kv.pages, torch.float32, torch.device("cpu"))


def spans(*places: tuple[int, int]) -> list[Span]:
    """Of (start, rows), one after the other, each sequence on pages of its own."""
    found, row, page = [], 0, 0
    for start, rows in places:
        pages = -(-(start + rows) // PAGE)
        found.append(Span(row, rows, start, range(page, page + pages)))
        row, page = row + rows, page + pages
    return found


@pytest.mark.parametrize(
    ("longest_padded", "calls"),
    [(0, 3), (64, 2), (256, 1)],  # without padding, one call for each length that a position asks for
)
def test_short_rows_of_like_length_share_a_call(kv: PagedKv, longest_padded: int, calls: int) -> None:
    plan = backend(kv, longest_padded).plan(spans((20, 2), (50, 2), (100, 2)), 6)
    assert len(plan._calls) == calls


def test_rows_across_a_border_stay_together_where_calls_may_be_padded(kv: PagedKv) -> None:
    assert len(backend(kv, 0).plan(spans((30, 4)), 4)._calls) == 2
    assert len(backend(kv, 256).plan(spans((30, 4)), 4)._calls) == 1


def test_many_that_would_be_padded_far_get_a_call_of_their_own(kv: PagedKv) -> None:
    """Nine short sequences beside a long one: padding all would cost more than a call."""
    many = spans(*[(10, 1)] * 9, (250, 1))
    wide = AttentionForm((32, 2048), longest_padded=2048)
    plan = MatmulBackend(wide, HEADS, KV_HEADS, PAGE, kv.pages, torch.float32, torch.device("cpu")).plan(many, 10)
    assert len(plan._calls) == 2


def test_what_comes_out_is_the_attention_of_each_sequence(kv: PagedKv) -> None:
    places = spans((20, 2), (30, 4), (100, 2), (5, 20))
    rows = sum(span.rows for span in places)
    query = torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    layer = kv.layers[0]
    together = backend(kv, 256).plan(places, rows).attend(layer, query, 0.25)
    for span in places:
        exclusive = Span(0, span.rows, span.start, span.pages)
        part = query[span.first_row : span.first_row + span.rows]
        expected = backend(kv, 0).plan([exclusive], span.rows).attend(layer, part, 0.25)
        assert torch.allclose(together[span.first_row : span.first_row + span.rows], expected, atol=1e-6)
