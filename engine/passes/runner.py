"""One forward pass over a batch of tokens of many sequences, with a Hugging Face causal model left as it is."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from spool.engine.attention.backends import AttentionBackend
from spool.engine.kv.paged_kv import PagedKv
from spool.engine.kv.pages import PagePool, PageTable
from spool.engine.models.memory_plan import MAX_LOGITS_ROWS
from spool.engine.parallel.lead import Lead
from spool.engine.passes.device import PassClock, current, is_lost
from spool.engine.passes.eager import EagerPasses, forward
from spool.engine.passes.graphed import GraphedPasses
from spool.engine.passes.layout import BatchedSequence, TokenBatch
from spool.engine.passes.solo import SoloPasses
from spool.engine.steps import Computing, EngineTimings, no_callback


@dataclass(slots=True)
class PassResult:
    """`logits` `[sum of logits asked for, vocabulary]`, in the order of TokenBatch, until the next pass; what is
    known of the time, and the clock that knows the rest."""

    logits: torch.Tensor
    timings: EngineTimings
    clock: PassClock


class ModelRunner:
    """Runs passes whose row count is one of `row_counts` (ascending), or free where that is empty."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv: PagedKv,
        backend: AttentionBackend,
        row_counts: Sequence[int] = (),
        graphs: GraphedPasses | None = None,
        lead: Lead | None = None,
        passes: SoloPasses | None = None,
    ) -> None:
        """`graphs`: those of the device, where it has any. `lead`: to the other ranks of this worker, where it has
        any; this runner is then the newest of its orders. `passes`: what computes in the place of `EagerPasses`."""
        self.model = model
        self.kv = kv
        self.backend = backend
        self.graphs = graphs
        self.lead = lead
        self.row_counts = tuple(row_counts)
        counts = [count for count in row_counts if count <= MAX_LOGITS_ROWS]
        self.max_logits = max(counts, default=MAX_LOGITS_ROWS)
        """Rows of logits that memory is planned for, in one of `row_counts`."""
        self._eager = passes or EagerPasses(partial(forward, model), kv, backend, self.padded)
        # The model searches its layers for it each time.
        self._device = model.device
        self._current_device = current(self._device)
        self._launches = self._device.type == "cuda"

    @property
    def device_lost(self) -> bool:
        """Whether the device computes nothing more for this process."""
        return is_lost(self._device)

    def padded(self, rows: int) -> int:
        """The row count that a pass or LM head call with `rows` real rows runs on. Raises ValueError past the last."""
        if not self.row_counts:
            return rows
        index = bisect_left(self.row_counts, rows)
        if index == len(self.row_counts):
            raise ValueError(f"rows is {rows}, must be at most {self.row_counts[-1]}")
        return self.row_counts[index]

    def _pass_rows(self, rows: int) -> int:
        """The row count of a pass: of a graph, if there is one that holds the rows. Graphs have some of `row_counts`,
        so that exact mode allows theirs as it allows the least."""
        graphed = None if self.graphs is None else self.graphs.padded(rows)
        return self.padded(rows) if graphed is None else graphed

    def discard(self, pool: PagePool, table: PageTable, length: int) -> None:
        """Truncates a table whose KV from `length` on may not be finite, and leaves none of it to the next owner."""
        for group, run in enumerate(table.runs):
            first = length // pool.page_size - run.freed * pool.groups[group].slices
            places, offset = self.kv.places(group, run.pages)[first:], length % pool.page_size
            if self.lead is not None:
                self.lead.scrub(group, places, offset)
            self.kv.scrub(group, places, offset)
        pool.truncate(table, length)

    @torch.inference_mode()
    def run(
        self,
        sequences: Sequence[BatchedSequence],
        computing: Computing = no_callback,
        fed: torch.Tensor | None = None,
    ) -> PassResult:
        """Computes a pass, or starts to: on a GPU, reading the logits waits for it. `fed` as in TokenBatch; not where
        there are other ranks."""
        started = time.perf_counter()
        batch = TokenBatch.of(sequences, self.kv, self._pass_rows, fed)
        together = nullcontext() if self.lead is None else self.lead.passing(sequences)
        with self._current_device, together:
            graphed = None if self.graphs is None else self.graphs.prepare(batch)
            prepared = graphed or self._eager.prepare(batch)
            planned = time.perf_counter()
            if not self._launches:
                computing()
            clock = PassClock(self._device)
            logits = prepared.compute()
            clock.computed()
            if self._launches:
                computing()
        timings = EngineTimings(
            prepare=planned - started,
            realign=prepared.planning if batch.is_ragged else 0.0,
            batched_tokens=batch.rows,
            padding_rows=batch.padded_rows - batch.rows,
        )
        return PassResult(logits, timings, clock)
