"""Paged attention against float32, and how long it takes by context, and in prefill by the size of its tiles."""

from __future__ import annotations

import itertools
import math
from functools import partial

import torch

from bench.gpu.device import graphed_seconds
from bench.gpu.findings import Findings
from spool.engine.attention.backends import AttentionRule, Span
from spool.engine.cuda.triton_attention import TritonBackend, takes_wide_tiles
from spool.engine.kv.kv_store import kv_row_bytes
from spool.engine.kv.paged_kv import PagedKv

_PAGE_SIZE = 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Query heads and KV heads, and sizes of a head.
_HEADS = ((32, 8), (16, 8), (8, 8))
_HEAD_DIMS = (64, 128)
# Start and rows of the sequences of one pass.
_SPANS = ((0, 1), (250, 12), (200, 70), (511, 1), (1500, 5))
_TIMED_CONTEXTS = (128, 2048, 8192)
_TIMED_BATCHES = (1, 8, 32)
# Positions before the rows of a long prefill.
_TIMED_STARTS = (0, 6144)
_PREFILL_ROWS = 2048
_CALLS = 12


def check_attention(device: torch.device, findings: Findings) -> None:
    """Largest difference from float32 attention on the same values, and whether rows have the bits that they have
    alone, in wide tiles where there are some."""
    for dtype, quantized, heads, head_dim in itertools.product(_DTYPES, (False, True), _HEADS, _HEAD_DIMS):
        if quantized and dtype == torch.float32:
            continue
        query_heads, kv_heads = heads
        spans, rows, kv = _pass(_SPANS, kv_heads, head_dim, dtype, device, quantized)
        generator = torch.Generator(device).manual_seed(5)
        query = torch.empty(rows, query_heads, head_dim, dtype=dtype, device=device).normal_(generator=generator)
        is_wide = takes_wide_tiles((*heads, head_dim), dtype, quantized)
        backend = TritonBackend(*heads, _PAGE_SIZE, device, wide_from=0.0 if is_wide else math.inf)
        rule = AttentionRule(head_dim**-0.5)
        found = backend.plan(spans, rows).attend(kv.layers[0], query, rule).clone()
        unequal = 0
        for span in spans:
            for row in range(span.rows):
                alone = Span(0, 1, span.start + row, span.pages)
                place = span.first_row + row
                one = backend.plan([alone], 1).attend(kv.layers[0], query[place : place + 1], rule)
                unequal += not torch.equal(one[0], found[place])
        findings.add(
            "attention against float32",
            dtype=str(dtype),
            quantized_kv=quantized,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            wide_tiles=is_wide,
            max_error=float((found.float() - _expected(kv, query, spans, rule.scaling)).abs().max()),
            rows=rows,
            rows_unlike_alone=unequal,
        )


def check_last_pages(device: torch.device, findings: Findings) -> None:
    """In a pool of most of the free memory, whether the last pages give the bits that the first do: offsets beyond what
    32 bits hold."""
    query_heads, kv_heads, head_dim = 32, 8, 128
    page_bytes = 2 * _PAGE_SIZE * kv_heads * head_dim * 2
    pages = int(0.8 * torch.cuda.mem_get_info(device)[0]) // page_bytes
    kv = PagedKv(1, pages, _PAGE_SIZE, kv_heads, head_dim, torch.bfloat16, device)
    shape = (2, 2, kv_heads, _PAGE_SIZE, head_dim)
    content = torch.randn(shape, generator=torch.Generator(device).manual_seed(8), device=device)
    query = torch.randn(1, query_heads, head_dim, dtype=torch.bfloat16, device=device)
    plan = TritonBackend(query_heads, kv_heads, _PAGE_SIZE, device, wide_from=math.inf).plan
    found = []
    for first in (0, pages - 2):
        kv.layers[0].part(first, 2).fill(content)
        span = Span(0, 1, 2 * _PAGE_SIZE - 1, [first, first + 1])
        found.append(plan([span], 1).attend(kv.layers[0], query, AttentionRule(head_dim**-0.5)).clone())
    findings.add("attention over the last pages", gib=pages * page_bytes / 2**30, equal=torch.equal(*found))


def time_attention(device: torch.device, findings: Findings, bandwidth: float) -> None:
    """Of one layer of Qwen3-8B, one row a sequence, and in a long prefill; `read_microseconds`: what reading the KV
    alone would take."""
    query_heads, kv_heads, head_dim = 32, 8, 128

    def microseconds(lengths: list[tuple[int, int]], wide_from: float, quantized: bool = False) -> float:
        spans, rows, kv = _pass(lengths, kv_heads, head_dim, torch.bfloat16, device, quantized)
        query = torch.randn(rows, query_heads, head_dim, dtype=torch.bfloat16, device=device)
        plan = TritonBackend(query_heads, kv_heads, _PAGE_SIZE, device, wide_from=wide_from).plan(spans, rows)
        calls = [partial(plan.attend, kv.layers[0], query, AttentionRule(head_dim**-0.5))] * _CALLS
        return graphed_seconds(calls, device) * 1e6

    for quantized, context, batch in itertools.product((False, True), _TIMED_CONTEXTS, _TIMED_BATCHES):
        row_bytes = kv_row_bytes(head_dim, torch.bfloat16.itemsize, quantized)
        findings.add(
            "attention of one layer",
            quantized_kv=quantized,
            context=context,
            batch=batch,
            microseconds=microseconds([(context - 1, 1)] * batch, math.inf, quantized),
            read_microseconds=batch * context * 2 * kv_heads * row_bytes / bandwidth * 1e6,
        )
    for start, wide_tiles in itertools.product(_TIMED_STARTS, (False, True)):
        findings.add(
            "prefill attention of one layer",
            start=start,
            rows=_PREFILL_ROWS,
            wide_tiles=wide_tiles,
            microseconds=microseconds([(start, _PREFILL_ROWS)], 0.0 if wide_tiles else math.inf),
        )


def _pass(
    lengths: tuple[tuple[int, int], ...] | list[tuple[int, int]],
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    quantized: bool = False,
) -> tuple[list[Span], int, PagedKv]:
    """Spans of sequences on pages in random order, their rows, and one layer of random KV."""
    counts = [-(-(start + rows) // _PAGE_SIZE) for start, rows in lengths]
    generator = torch.Generator().manual_seed(4)
    order = iter(torch.randperm(sum(counts), generator=generator).tolist())
    spans, first = [], 0
    for (start, rows), pages in zip(lengths, counts, strict=True):
        spans.append(Span(first, rows, start, [next(order) for _ in range(pages)]))
        first += rows
    kv = PagedKv(1, sum(counts), _PAGE_SIZE, kv_heads, head_dim, dtype, device, quantized)
    shape = (2, kv.pages, kv_heads, _PAGE_SIZE, head_dim)
    kv.layers[0].fill(torch.randn(shape, generator=torch.Generator(device).manual_seed(6), device=device))
    return spans, first, kv


def _expected(kv: PagedKv, query: torch.Tensor, spans: list[Span], scaling: float) -> torch.Tensor:
    """In float32, without pages: `[rows, query heads, head_dim]`."""
    outputs = []
    for span in spans:
        pages = torch.tensor(span.pages, device=query.device)
        # [2, kv heads, positions, head_dim]
        keys, values = kv.layers[0].content()[:, pages].permute(0, 2, 1, 3, 4).flatten(2, 3)
        rows = query[span.first_row : span.first_row + span.rows].float()
        group = rows.shape[1] // keys.shape[0]
        keys, values = (part.repeat_interleave(group, 0) for part in (keys, values))
        scores = torch.einsum("rhd,hpd->hrp", rows, keys) * scaling
        last = span.start + torch.arange(span.rows, device=query.device)
        hidden = torch.arange(keys.shape[1], device=query.device)[None] > last[:, None]
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
        outputs.append(torch.einsum("hrp,hpd->rhd", weights, values))
    return torch.cat(outputs)
