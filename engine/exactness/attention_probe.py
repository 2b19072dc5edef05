"""Does attention in a given form give a row the same bits whatever shares its call? Tried on random keys and values."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from spool.engine.attention.backends import AttentionBackend, AttentionRule, Span
from spool.engine.kv.paged_kv import PagedKv

_SEED = 2510
_STARTS = 3
# Of larger numbers of rows, some are tried.
_EVERY_COUNT, _LARGE_STEP = 193, 61

# In each sequence the first position and this one share a key, which queries look for, and have opposite values.
_CANCELLING = (5, 27, 90, 400)
_SEQUENCES = len(_CANCELLING)
_CANCELLING_VALUE = 4096.0
_CANCELLING_SCORE = 6.0


class AttentionProbe:
    """Sequences of random K/V as long as the KV lengths in use, and each position's query by itself as the reference.

    Kernels work through query rows in blocks, and the last rows of a block may run on another kernel than the others.
    So every number of rows that a small step can have is tried, at several places, and every row of it is compared.

    Rounding to 16 bits hides most differences in the order of a sum. Two large terms that cancel uncover them: what was
    added while only one of them was in the sum has lost its last bits.
    """

    def __init__(self, backend: AttentionBackend, kv: PagedKv, query_heads: int, longest: int) -> None:
        """`longest` positions a sequence; `kv` has at least one layer and pages for `_SEQUENCES` of them."""
        self._backend = backend
        self._layer = kv.layers[0]
        pages = -(-longest // kv.page_size)
        self._pages = [range(index * pages, (index + 1) * pages) for index in range(_SEQUENCES)]
        self._longest = longest
        head_dim = self._layer.head_dim
        generator = torch.Generator().manual_seed(_SEED)
        shape = (2, self._layer.pages, self._layer.kv_heads, kv.page_size, head_dim)
        content = torch.randn(shape, generator=generator).to(self._layer.dtype)
        queries = torch.randn(_SEQUENCES, longest, query_heads, head_dim, generator=generator)
        self._rule = AttentionRule(head_dim**-0.5)
        keys, values = content
        for query, of_sequence, place in zip(queries, self._pages, _CANCELLING, strict=True):
            position = min(place, longest - 1)
            first, page, offset = of_sequence[0], of_sequence[position // kv.page_size], position % kv.page_size
            sought = keys[first, :, 0]
            keys[page, :, offset] = sought
            values[first, :, 0] = _CANCELLING_VALUE
            values[page, :, offset] = -_CANCELLING_VALUE
            towards = sought.float() / (sought.float().square().sum(-1, keepdim=True) * self._rule.scaling)
            query += _CANCELLING_SCORE * towards.repeat_interleave(query_heads // self._layer.kv_heads, dim=0)
        self._layer.fill(content)
        self._queries = queries.to(self._layer.pool.device, self._layer.dtype)

    @staticmethod
    def pages(longest: int, page_size: int) -> int:
        return _SEQUENCES * -(-longest // page_size)

    @torch.inference_mode()
    def first_difference(self, max_rows: int) -> str | None:
        """None when every row keeps its bits in every call of up to `max_rows` rows a sequence."""
        rng = random.Random(_SEED)
        alone: dict[tuple[int, int], torch.Tensor] = {}
        most = min(max_rows, self._longest) + 1
        for rows in (*range(1, min(_EVERY_COUNT, most)), *range(_EVERY_COUNT, most, _LARGE_STEP)):
            for _ in range(_STARTS):
                indices = rng.sample(range(_SEQUENCES), rng.randint(1, _SEQUENCES))
                parts = [(index, rng.randint(0, self._longest - rows), rows) for index in indices]
                together = self._attend(parts)
                for (index, start, _), outcome in zip(parts, together.split(rows), strict=True):
                    places = [(index, position) for position in range(start, start + rows)]
                    for place in places:
                        # In calls of one row, for which libraries may have other kernels.
                        if place not in alone:
                            alone[place] = self._attend([(*place, 1)])
                    if not torch.equal(outcome, torch.cat([alone[place] for place in places])):
                        return f"attention of {rows} rows from position {start} on differs from row by row"
        return None

    def _attend(self, parts: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Output `[rows, heads, head_dim]` of (sequence, start, rows) one after the other."""
        spans = []
        queries = []
        batched = 0
        for index, start, rows in parts:
            spans.append(Span(batched, rows, start, self._pages[index]))
            queries.append(self._queries[index, start : start + rows])
            batched += rows
        query = torch.cat(queries)
        return self._backend.plan(spans, batched).attend(self._layer, query, self._rule)
