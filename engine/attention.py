"""Attention of packed rows over paged KV, plugged into transformers by `AttentionInterface.register`.

A backend turns the layout of a pass into a plan once, and the plan then attends in every layer. `sdpa` runs anywhere; a
`varlen` backend for CUDA has the same two methods.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from transformers import AttentionInterface

from engine.errors import UnsupportedModelError

if TYPE_CHECKING:
    from engine.paged_kv import PagedStep

ATTENTION_NAME = "spool_paged"

# Sequences with at most this many rows in a pass (decode, verify) share one call; longer ones (prefill) have their own.
_SHARED_CALL_ROWS = 16


@dataclass(frozen=True, slots=True)
class Span:
    """Packed rows `[first_row, first_row + rows)` are positions `[start, start + rows)` of the sequence on `pages`."""

    first_row: int
    rows: int
    start: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """Shapes that attention calls keep to.

    Each sequence's rows are padded to a multiple of `query_multiple` and cut to at most `most_query_rows`. With
    `kv_lengths` (ascending; past the last, its multiples) the KV length of a call depends on nothing but the position
    of the row: the smallest of them that holds it. Without, KV is padded to whole pages of the call's longest sequence.
    """

    query_multiple: int = 1
    most_query_rows: int | None = None
    kv_lengths: tuple[int, ...] = ()

    def kv_length(self, positions: int) -> int:
        index = bisect_left(self.kv_lengths, positions)
        if index < len(self.kv_lengths):
            return self.kv_lengths[index]
        return -(-positions // self.kv_lengths[-1]) * self.kv_lengths[-1]


class AttentionPlan(Protocol):
    def attend(self, keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """`query` `[1, heads, rows, head_dim]` over a layer's pages; gives `[1, rows, heads, head_dim]`."""
        ...


class AttentionBackend(Protocol):
    def plan(self, spans: Sequence[Span], packed_rows: int) -> AttentionPlan:
        """`packed_rows` counts the padding rows at the end, which belong to no span."""
        ...


@dataclass(frozen=True, slots=True)
class _Call:
    """A batched SDPA call: `queries` `[n, q]` packed rows, `pages` `[n, p]`, `mask` `[n, 1, q * group, kv length]`."""

    queries: torch.Tensor
    pages: torch.Tensor
    mask: torch.Tensor


class SdpaPlan:
    def __init__(self, calls: list[_Call], output_rows: torch.Tensor) -> None:
        self._calls = calls
        self._output_rows = output_rows

    def attend(self, keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor, scaling: float) -> torch.Tensor:
        kv_heads, head_dim = keys.shape[-2:]
        rows = query[0].transpose(0, 1)
        heads = rows.shape[1]
        outputs = []
        for call in self._calls:
            n, q = call.queries.shape
            # The query heads of a KV head become rows of one call, so that K and V are not repeated.
            packed = rows[call.queries].view(n, q, kv_heads, heads // kv_heads, head_dim).transpose(1, 2)
            packed = packed.reshape(n, kv_heads, -1, head_dim)
            k = keys[call.pages].flatten(1, 2).transpose(1, 2)
            v = values[call.pages].flatten(1, 2).transpose(1, 2)
            out = F.scaled_dot_product_attention(packed, k, v, attn_mask=call.mask, scale=scaling)
            out = out.view(n, kv_heads, q, heads // kv_heads, head_dim).transpose(1, 2)
            outputs.append(out.reshape(n * q, heads, head_dim))
        flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat[self._output_rows].unsqueeze(0)


class SdpaBackend:
    """Gathers each sequence's pages and calls `scaled_dot_product_attention` in the shapes that `form` allows."""

    def __init__(
        self,
        form: AttentionForm,
        query_heads_per_kv_head: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._form = form
        self._group = query_heads_per_kv_head
        self._page_size = page_size
        self._dtype = dtype
        self._device = device

    def plan(self, spans: Sequence[Span], packed_rows: int) -> SdpaPlan:
        calls: list[_Call] = []
        output_rows = [0] * packed_rows
        base = 0
        for blocks in self._partition(spans):
            multiple = self._form.query_multiple
            query_rows = -(-max(block.rows for block in blocks) // multiple) * multiple
            calls.append(self._call(blocks, query_rows))
            for index, block in enumerate(blocks):
                first = base + index * query_rows
                output_rows[block.first_row : block.first_row + block.rows] = range(first, first + block.rows)
            base += len(blocks) * query_rows
        return SdpaPlan(calls, torch.tensor(output_rows, device=self._device))

    def _partition(self, spans: Sequence[Span]) -> list[list[Span]]:
        """Spans, cut where the form asks for it, by the call they share: equal KV length, and short ones together."""
        shared: dict[tuple[int, int], list[Span]] = {}
        for span in spans:
            for kv_length, block in self._blocks(span):
                alone = block.first_row if block.rows > _SHARED_CALL_ROWS else -1
                shared.setdefault((kv_length, alone), []).append(block)
        return list(shared.values())

    def _blocks(self, span: Span) -> Iterator[tuple[int, Span]]:
        if not self._form.kv_lengths:
            yield 0, span
            return
        done = 0
        while done < span.rows:
            kv_length = self._form.kv_length(span.start + done + 1)
            rows = min(span.rows - done, kv_length - (span.start + done), self._form.most_query_rows or span.rows)
            yield kv_length, Span(span.first_row + done, rows, span.start + done, span.pages)
            done += rows

    def _call(self, blocks: Sequence[Span], query_rows: int) -> _Call:
        positions_held = max(block.start + block.rows for block in blocks)
        kv_length = self._form.kv_length(positions_held) if self._form.kv_lengths else positions_held
        page_count = -(-kv_length // self._page_size)
        # Unused entries name a page of the same sequence, hidden by the mask: a NaN elsewhere must not leak in.
        pages = torch.tensor([_fit(block.pages, page_count) for block in blocks], device=self._device)
        edges = torch.tensor([[block.first_row, block.start, block.rows] for block in blocks], device=self._device)
        first_row, start, rows = edges.unsqueeze(-1).unbind(1)
        # Rows past a block's end repeat its last one: their output is not used, and no row is fully masked.
        offset = torch.arange(query_rows, device=self._device).expand(len(blocks), -1).minimum(rows - 1)
        positions = torch.arange(page_count * self._page_size, device=self._device)
        visible = positions <= (start + offset).unsqueeze(-1)
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=self._device).masked_fill_(~visible, float("-inf"))
        mask = mask.repeat_interleave(self._group, dim=1).unsqueeze(1)
        return _Call(first_row + offset, pages, mask)


def _fit(pages: Sequence[int], count: int) -> list[int]:
    return [*pages[:count], *(pages[0] for _ in range(count - len(pages)))]


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    paged_step: PagedStep | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if paged_step is None:
        raise UnsupportedModelError("the model does not pass keyword arguments on to its attention")
    for name in ("sliding_window", "softcap", "s_aux", "head_mask", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"the model's attention uses {name}, which paged attention does not support")
    layer = module.layer_idx
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    kv = paged_step.kv
    return paged_step.plan.attend(kv.keys[layer], kv.values[layer], query, scaling), None


AttentionInterface.register(ATTENTION_NAME, _paged_attention)
