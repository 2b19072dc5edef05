"""Attention of a batch over paged KV.

A backend turns the layout of a pass into a plan once, and the plan then attends in every layer. `MatmulBackend` runs
anywhere; others read the pages where they lie (engine/cpu/attention.py on CPUs, engine/cuda/triton_attention.py on
GPUs).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
import torch

from spool.engine.kv.paged_kv import LayerKv

# Few lengths, so that sequences share calls, but close enough that little of a call is padding.
_KV_LENGTHS = (128, 256, 384, 512, 768, 1024, 1536, 2048)

# Kernels that read pages look at whole tiles of at most so many positions: also at some before the first that is seen.
TILE_POSITIONS = 64

# Sequences with at most this many rows in a pass (decode, verify) share one call; longer ones (prefill) have their own.
_SHARED_CALL_ROWS = 16


@dataclass(slots=True)
class Span:
    """Rows `[first_row, first_row + rows)` of a batch: positions `[start, start + rows)` of the sequence on `pages`,
    but for the first `freed`, of which no row sees a position. `owner`: a number that this sequence has in all passes.
    """

    first_row: int
    rows: int
    start: int
    pages: Sequence[int]
    freed: int = 0
    owner: int = 0


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer attends.

    A score is the product of a query and a key times `scaling`; with `softcap` c it becomes c tanh(score / c). A row
    sees the last `window` positions up to its own; None: all. `sinks`, float32 `[query heads]`, are one more score of
    each head, which has a share and no value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """Shapes that attention calls keep to.

    The KV length of a call depends on nothing but the position of its rows: the smallest of `kv_lengths` (ascending)
    that holds it, past the last one their multiples. Each sequence's rows are padded to a multiple of `query_multiple`
    and cut to at most `max_query_rows`.
    """

    kv_lengths: tuple[int, ...]
    query_multiple: int = 1
    max_query_rows: int | None = None

    @classmethod
    def from_plain(cls, form: dict[str, Any]) -> Self:
        """Of what JSON has kept of `dataclasses.asdict`."""
        return cls(**(form | {"kv_lengths": tuple(form["kv_lengths"])}))

    def summary(self) -> str:
        limit = "any number of" if self.max_query_rows is None else f"at most {self.max_query_rows}"
        return (
            f"with {limit} query rows in multiples of {self.query_multiple} over KV lengths "
            f"{', '.join(map(str, self.kv_lengths))} and multiples"
        )

    def kv_length(self, positions: int) -> int:
        index = bisect_left(self.kv_lengths, positions)
        if index < len(self.kv_lengths):
            return self.kv_lengths[index]
        return -(-positions // self.kv_lengths[-1]) * self.kv_lengths[-1]


Block = tuple[int, int, int, int]
"""Its first row, its rows, the position of the first, and where in a list of pages those of its sequence begin."""


def cut_into_blocks(spans: Sequence[Span], page_size: int, max_rows: int) -> tuple[list[Block], list[int]]:
    """What kernels that read pages take: blocks of at most `max_rows` rows of one sequence, and the list of pages. A
    tile's freed pages are others of its sequence there, and those before them are left out."""
    first_places: list[int] = []
    pages: list[int] = []
    for span in spans:
        left_out = max(0, span.freed - tile_pages(page_size))
        first_places.append(len(pages) - left_out)
        pages.extend([span.pages[0]] * (span.freed - left_out))
        pages.extend(span.pages[: -(-(span.start + span.rows) // page_size) - span.freed])
    return blocks_of(spans, first_places, max_rows), pages


def blocks_of(spans: Sequence[Span], first_places: Sequence[int], max_rows: int) -> list[Block]:
    """`first_places`: where the pages of each span begin."""
    return [
        (span.first_row + done, min(max_rows, span.rows - done), span.start + done, place)
        for span, place in zip(spans, first_places, strict=True)
        for done in range(0, span.rows, max_rows)
    ]


def tile_pages(page_size: int) -> int:
    """Freed pages of a sequence that kernels may look at."""
    return -(-TILE_POSITIONS // page_size)


def kv_lengths(page_size: int) -> tuple[int, ...]:
    """The usual KV lengths, in whole pages."""
    return tuple(sorted({-(-length // page_size) * page_size for length in _KV_LENGTHS}))


def unrestricted_form(page_size: int) -> AttentionForm:
    """For passes whose bits may depend on what shares them."""
    return AttentionForm(kv_lengths(page_size))


def attention_forms(page_size: int) -> Iterator[AttentionForm]:
    """Cheapest first; the last has one shape only."""
    lengths = kv_lengths(page_size)
    for multiple in (1, 2, 4, 8):
        yield AttentionForm(lengths, multiple)
    yield AttentionForm(lengths, 8, 8)
    yield AttentionForm(lengths[-1:], 8, 8)


class AttentionPlan(Protocol):
    def attend(self, layer: LayerKv, query: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """`query` `[rows, heads, head_dim]` over a layer's pages; gives the same shape."""
        ...


class AttentionBackend(Protocol):
    def plan(self, spans: Sequence[Span], batched_tokens: int) -> AttentionPlan:
        """`batched_tokens` counts the padding rows at the end, which belong to no span."""
        ...


@dataclass(frozen=True, slots=True)
class _Call:
    """`n` sequences with `q` query rows each over one KV length.

    `queries` `[n * q]` rows of the batch; `chunks` `[n * kv_heads * pages]` rows of the pool;
    `last_seen` `[n, q]` positions; `shape` of scores: n, KV heads, q, group, KV length.
    """

    sequences: int
    queries: torch.Tensor
    chunks: torch.Tensor
    last_seen: torch.Tensor
    shape: tuple[int, ...]
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """`[n * kv_heads, q * group, kv length]`, additive; made once for all layers of that window."""
        if window not in self.masks:
            n, kv_heads, rows, group, kv_length = self.shape
            positions, last_seen = torch.arange(kv_length, device=self.queries.device), self.last_seen.unsqueeze(-1)
            hidden = positions > last_seen
            if window is not None:
                hidden |= positions <= last_seen - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            mask = mask.view(n, 1, rows, 1, kv_length).expand(self.shape)
            self.masks[window] = mask.reshape(n * kv_heads, rows * group, kv_length)
        return self.masks[window]


class MatmulPlan:
    def __init__(self, calls: list[_Call], output_rows: torch.Tensor | None) -> None:
        self.calls = calls
        self._output_rows = output_rows

    def attend(self, layer: LayerKv, query: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        outputs = [self._attend(call, layer, query, rule) for call in self.calls]
        flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat if self._output_rows is None else flat.index_select(0, self._output_rows)

    @staticmethod
    def _attend(call: _Call, layer: LayerKv, query: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        n, kv_heads = call.sequences, layer.kv_heads
        heads, head_dim = query.shape[1:]
        # The query heads of a KV head become rows of one product, so that K and V are not repeated.
        queries = query.index_select(0, call.queries).view(n, -1, kv_heads, heads // kv_heads, head_dim)
        queries = queries.transpose(1, 2).reshape(n * kv_heads, -1, head_dim)
        keys, values = layer.gather(call.chunks).view(2, n * kv_heads, -1, head_dim)
        mask = call.mask(rule.window, query.dtype)
        if rule.softcap is None:
            scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=rule.scaling)
        else:
            products = torch.bmm(queries, keys.transpose(1, 2))
            scores = torch.tanh(products * (rule.scaling / rule.softcap)) * rule.softcap + mask
        if rule.sinks is None:
            weights = torch.softmax(scores, -1)
        else:
            sinks = rule.sinks.to(scores.dtype).view(1, kv_heads, 1, -1, 1).expand(*call.shape[:-1], 1)
            weights = torch.softmax(torch.cat((scores, sinks.reshape(*scores.shape[:-1], 1)), -1), -1)
            weights = weights[..., :-1].contiguous()
        out = torch.bmm(weights, values).view(n, kv_heads, -1, heads // kv_heads, head_dim)
        return out.transpose(1, 2).reshape(-1, heads, head_dim)


class MatmulBackend:
    """Gathers each sequence's pages and multiplies matrices in the shapes that `form` allows.

    Plain products and a softmax rather than a fused kernel: batched matrix products keep a row's bits
    whatever their row count, which the fused CPU kernel does not (docs/exactness.md), and take less time for few rows.
    """

    def __init__(
        self,
        form: AttentionForm,
        query_heads: int,
        kv_heads: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._form = form
        self._group = query_heads // kv_heads
        self._page_size = page_size
        self._device = device
        self._kv_heads = kv_heads

    def plan(self, spans: Sequence[Span], batched_tokens: int) -> MatmulPlan:
        calls: list[_Call] = []
        output_rows = [0] * batched_tokens
        base = 0
        for kv_length, blocks in self._partition(spans):
            multiple = self._form.query_multiple
            query_rows = -(-_round_up(max(block.rows for block in blocks)) // multiple) * multiple
            # What fills a call up to its size computes again what the first sequence does, and is not used.
            filled = [*blocks, *[blocks[0]] * (_round_up(len(blocks)) - len(blocks))]
            calls.append(self._call(filled, query_rows, kv_length))
            for index, block in enumerate(blocks):
                first = base + index * query_rows
                output_rows[block.first_row : block.first_row + block.rows] = range(first, first + block.rows)
            base += len(filled) * query_rows
        in_order = base == batched_tokens and output_rows == list(range(batched_tokens))
        return MatmulPlan(calls, None if in_order else torch.tensor(output_rows, device=self._device))

    def _partition(self, spans: Sequence[Span]) -> Iterable[tuple[int, list[Span]]]:
        """Spans, cut where the form asks for it, by the call they share: short ones together, of like KV length."""
        shared: dict[int, list[Span]] = {}
        calls: list[tuple[int, list[Span]]] = []
        for span in spans:
            for kv_length, block in self._blocks(span):
                if block.rows > _SHARED_CALL_ROWS:
                    calls.append((kv_length, [block]))
                else:
                    shared.setdefault(kv_length, []).append(block)
        return [*calls, *shared.items()]

    def _blocks(self, span: Span) -> Iterator[tuple[int, Span]]:
        done = 0
        while done < span.rows:
            kv_length = self._form.kv_length(span.start + done + 1)
            rows = min(span.rows - done, kv_length - (span.start + done), self._form.max_query_rows or span.rows)
            yield kv_length, Span(span.first_row + done, rows, span.start + done, span.pages, span.freed)
            done += rows

    def _call(self, blocks: Sequence[Span], query_rows: int, kv_length: int) -> _Call:
        page_count = kv_length // self._page_size
        # Unused entries name a page of the same sequence, hidden by the mask: a NaN elsewhere must not leak in.
        pages = np.array([_fit(block, page_count) for block in blocks])
        chunks = pages[:, None] * self._kv_heads + np.arange(self._kv_heads)[:, None]
        edges = np.array([[block.first_row, block.start, block.rows] for block in blocks])
        first_row, start, rows = edges[:, :, None].swapaxes(0, 1)
        # Rows past a block's end repeat its last one: their output is not used, and no row is fully masked.
        offset = np.minimum(np.arange(query_rows), rows - 1)
        return _Call(
            len(blocks),
            torch.from_numpy((first_row + offset).ravel()).to(self._device),
            torch.from_numpy(chunks.ravel()).to(self._device),
            torch.from_numpy(start + offset).to(self._device),
            (len(blocks), self._kv_heads, query_rows, self._group, kv_length),
        )


def _round_up(count: int) -> int:
    """To one of few sizes, less than half more: libraries keep a kernel and its memory for every shape they met."""
    step = max(1, 1 << (count - 1).bit_length() - 2) if count > 2 else 1
    return -(-count // step) * step


def _fit(span: Span, count: int) -> list[int]:
    some, pages = span.pages[0], span.pages[: count - span.freed]
    return [*[some] * span.freed, *pages, *[some] * (count - span.freed - len(pages))]
