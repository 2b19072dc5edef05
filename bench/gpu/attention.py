"""Paged attention against float32, and how long it takes by context."""

from __future__ import annotations

import itertools
import math
from functools import partial

import torch

from bench.gpu.device import graphed_seconds
from bench.gpu.findings import Findings
from engine.attention.backends import Span
from engine.cuda.triton_attention import AttentionTuning, TritonBackend
from engine.kv.paged_kv import PagedKv

_PAGE_SIZE = 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Query heads and KV heads, and sizes of a head.
_HEADS = ((32, 8), (16, 8), (8, 8))
_HEAD_DIMS = (64, 128)
# Start and rows of the sequences of one pass.
_SPANS = ((0, 1), (250, 12), (0, 70), (511, 1), (1500, 5))
_TIMED_CONTEXTS = (128, 2048, 8192)
_TIMED_BATCHES = (1, 8, 32)
_CALLS = 12
# Query heads, KV heads and dimensions of a head of Qwen3-8B.
_TIMED_HEADS = (32, 8, 128)
_ALTERNATIVES = (
    AttentionTuning(),
    AttentionTuning(programs=4),
    AttentionTuning(stages=7),
    AttentionTuning(stages=3, positions=128, tile_bytes=32 << 10),
    AttentionTuning(warps=4, registers=168, programs=3),
    AttentionTuning(warps=4, registers=168, programs=3, stages=3),
    AttentionTuning(warps=4, registers=168, programs=3, stages=7, positions=32),
    AttentionTuning(warps=4, registers=128, programs=4, positions=32),
    AttentionTuning(warps=2, registers=255, programs=4, stages=7, positions=32),
    AttentionTuning(overlap=False),
)


def check_attention(device: torch.device, findings: Findings) -> None:
    """Largest difference from float32 attention on the same values, and whether rows have the bits that they have
    alone."""
    for dtype, heads, head_dim in itertools.product(_DTYPES, _HEADS, _HEAD_DIMS):
        query_heads, kv_heads = heads
        spans, rows, kv = _pass(_SPANS, kv_heads, head_dim, dtype, device)
        generator = torch.Generator(device).manual_seed(5)
        query = torch.empty(rows, query_heads, head_dim, dtype=dtype, device=device).normal_(generator=generator)
        backend = TritonBackend(query_heads, kv_heads, _PAGE_SIZE, device)
        scaling = head_dim**-0.5
        found = backend.plan(spans, rows).attend(kv.layers[0], query, scaling).clone()
        findings.add(
            "attention against float32",
            dtype=str(dtype),
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_error=float((found.float() - _expected(kv, query, spans, scaling)).abs().max()),
            rows=rows,
            rows_unlike_alone=_rows_unlike_alone(backend, kv, query, spans, found),
        )


def time_attention(device: torch.device, findings: Findings, bandwidth: float) -> None:
    """Of one layer of Qwen3-8B, one row a sequence; `read_microseconds`: what reading the KV alone would take."""
    _, kv_heads, head_dim = _TIMED_HEADS
    for context, batch in itertools.product(_TIMED_CONTEXTS, _TIMED_BATCHES):
        findings.add(
            "attention of one layer",
            context=context,
            batch=batch,
            microseconds=_microseconds(AttentionTuning(), context, batch, device),
            read_microseconds=batch * context * kv_heads * head_dim * 4 / bandwidth * 1e6,
        )


def time_alternatives(device: torch.device, findings: Findings) -> None:
    """As `time_attention`, for other ways to run the kernel, by context and batch. `unlike_same_order`: how many
    numbers differ from those of the first alternative that adds up in the same order."""
    query_heads, kv_heads, head_dim = _TIMED_HEADS
    spans, rows, kv = _pass(_SPANS, kv_heads, head_dim, torch.bfloat16, device)
    query = torch.randn(rows, query_heads, head_dim, dtype=torch.bfloat16, device=device)
    expected = _expected(kv, query, spans, head_dim**-0.5)
    first: dict[tuple[int, int], torch.Tensor] = {}
    for tuning in _ALTERNATIVES:
        try:
            backend = TritonBackend(query_heads, kv_heads, _PAGE_SIZE, device, tuning)
            found = backend.plan(spans, rows).attend(kv.layers[0], query, head_dim**-0.5).clone()
            same_order = first.setdefault((tuning.warps, tuning.positions), found)
            results: dict[str, object] = {
                "max_error": float((found.float() - expected).abs().max()),
                "unlike_same_order": int((found != same_order).sum()),
                "rows_unlike_alone": _rows_unlike_alone(backend, kv, query, spans, found),
            }
            for context, batch in itertools.product(_TIMED_CONTEXTS, _TIMED_BATCHES):
                results[f"microseconds_{context}_{batch}"] = _microseconds(tuning, context, batch, device)
        # Triton has errors of its own, and those of the compiler that it calls.
        except Exception as error:
            results = {"error": repr(error)[:500]}
        findings.add("alternative for attention", **tuning._asdict(), **results)


def _microseconds(tuning: AttentionTuning, context: int, batch: int, device: torch.device) -> float:
    query_heads, kv_heads, head_dim = _TIMED_HEADS
    spans, rows, kv = _pass([(context - 1, 1)] * batch, kv_heads, head_dim, torch.bfloat16, device)
    query = torch.randn(rows, query_heads, head_dim, dtype=torch.bfloat16, device=device)
    plan = TritonBackend(query_heads, kv_heads, _PAGE_SIZE, device, tuning).plan(spans, rows)
    calls = [partial(plan.attend, kv.layers[0], query, head_dim**-0.5)] * _CALLS
    return graphed_seconds(calls, device) * 1e6


def _rows_unlike_alone(
    backend: TritonBackend, kv: PagedKv, query: torch.Tensor, spans: list[Span], found: torch.Tensor
) -> int:
    """How many rows have other bits than in a pass of their own."""
    unlike = 0
    for span in spans:
        for row in range(span.rows):
            place = span.first_row + row
            alone = backend.plan([Span(0, 1, span.start + row, span.pages)], 1)
            one = alone.attend(kv.layers[0], query[place : place + 1], query.shape[2] ** -0.5)
            unlike += not torch.equal(one[0], found[place])
    return unlike


def _pass(
    lengths: tuple[tuple[int, int], ...] | list[tuple[int, int]],
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[list[Span], int, PagedKv]:
    """Spans of sequences on pages in random order, their rows, and one layer of random KV."""
    counts = [-(-(start + rows) // _PAGE_SIZE) for start, rows in lengths]
    generator = torch.Generator().manual_seed(4)
    order = iter(torch.randperm(sum(counts), generator=generator).tolist())
    spans, first = [], 0
    for (start, rows), pages in zip(lengths, counts, strict=True):
        spans.append(Span(first, rows, start, [next(order) for _ in range(pages)]))
        first += rows
    kv = PagedKv(1, sum(counts), _PAGE_SIZE, kv_heads, head_dim, dtype, device)
    kv.layers[0].pool.normal_(generator=torch.Generator(device).manual_seed(6))
    return spans, first, kv


def _expected(kv: PagedKv, query: torch.Tensor, spans: list[Span], scaling: float) -> torch.Tensor:
    """In float32, without pages: `[rows, query heads, head_dim]`."""
    outputs = []
    for span in spans:
        pages = torch.tensor(span.pages, device=query.device)
        # [2, kv heads, positions, head_dim]
        keys, values = kv.layers[0].pool[:, pages].float().permute(0, 2, 1, 3, 4).flatten(2, 3)
        rows = query[span.first_row : span.first_row + span.rows].float()
        group = rows.shape[1] // keys.shape[0]
        keys, values = (part.repeat_interleave(group, 0) for part in (keys, values))
        scores = torch.einsum("rhd,hpd->hrp", rows, keys) * scaling
        last = span.start + torch.arange(span.rows, device=query.device)
        hidden = torch.arange(keys.shape[1], device=query.device)[None] > last[:, None]
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
        outputs.append(torch.einsum("hrp,hpd->rhd", weights, values))
    return torch.cat(outputs)
