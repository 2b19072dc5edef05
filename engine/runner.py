"""One forward pass over packed rows of many sequences, with a Hugging Face causal model left as it is."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from engine.attention import AttentionBackend, Span
from engine.paged_kv import PagedKv, PagedStep
from engine.pages import PagePool, PageTable
from engine.steps import Computing, EngineTimings, nothing


@dataclass(slots=True)
class PackedSequence:
    """`tokens` to feed at the last `len(tokens)` positions of `table`, where room was made already; logits are wanted
    for the last `logits` of them."""

    table: PageTable
    tokens: Sequence[int]
    logits: int


@dataclass(slots=True)
class PassResult:
    """`logits` `[sum of logits asked for, vocabulary]`, in the order of the sequences; seconds spent on each part."""

    logits: torch.Tensor
    timings: EngineTimings = field(default_factory=EngineTimings)


class ModelRunner:
    """Runs passes whose row count is one of `row_counts` (ascending), or free where that is empty."""

    def __init__(
        self, model: PreTrainedModel, kv: PagedKv, backend: AttentionBackend, row_counts: Sequence[int] = ()
    ) -> None:
        self.model = model
        self.kv = kv
        self.backend = backend
        self.row_counts = tuple(row_counts)

    def padded(self, rows: int) -> int:
        """The row count that a pass or LM head call with `rows` real rows runs on. Raises ValueError past the last."""
        if not self.row_counts:
            return rows
        index = bisect_left(self.row_counts, rows)
        if index == len(self.row_counts):
            raise ValueError(f"rows is {rows}, must be at most {self.row_counts[-1]}")
        return self.row_counts[index]

    def discard(self, pool: PagePool, table: PageTable, length: int) -> None:
        """Truncates a table whose KV from `length` on may not be finite, and leaves none of it to the next owner."""
        self.kv.scrub(table.pages[length // pool.page_size :], length % pool.page_size)
        pool.truncate(table, length)

    @torch.inference_mode()
    def run(self, sequences: Sequence[PackedSequence], computing: Computing = nothing) -> PassResult:
        started = time.perf_counter()
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[Span] = []
        logits_rows: list[int] = []
        page_size = self.kv.page_size
        for sequence in sequences:
            count = len(sequence.tokens)
            start = sequence.table.length - count
            pages = sequence.table.pages
            spans.append(Span(len(tokens), count, start, pages))
            tokens.extend(sequence.tokens)
            positions.extend(range(start, start + count))
            slots.extend(pages[p // page_size] * page_size + p % page_size for p in range(start, start + count))
            logits_rows.extend(range(len(tokens) - sequence.logits, len(tokens)))
        rows = len(tokens)
        padding = self.padded(rows) - rows
        tokens.extend([0] * padding)
        positions.extend([0] * padding)
        slots.extend([self.kv.padding_slot] * padding)
        wanted = len(logits_rows)
        # A pass that wants no logits (prefill chunks alone) still pays for the smallest head call.
        logits_rows.extend([0] * (self.padded(max(wanted, 1)) - wanted))

        device = self.model.device
        input_ids, position_ids, slot_ids, head_rows = (
            torch.tensor(values, device=device) for values in (tokens, positions, slots, logits_rows)
        )
        aligned_from = time.perf_counter()
        plan = self.backend.plan(spans, rows + padding)
        planned = time.perf_counter()
        unequal = len({(span.start, span.rows) for span in spans}) > 1
        step = PagedStep(self.kv, slot_ids, plan)
        computing()
        logits = self.model(
            input_ids=input_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            past_key_values=step,
            paged_step=step,
            use_cache=True,
            logits_to_keep=head_rows,
        ).logits[0, :wanted]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        timings = EngineTimings(
            prepare=planned - started,
            realign=planned - aligned_from if unequal else 0.0,
            forward=time.perf_counter() - planned,
            packed_rows=rows,
            padding_rows=padding,
        )
        return PassResult(logits, timings)
