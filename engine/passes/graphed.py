"""Small passes on a GPU as CUDA graphs: one call instead of the launch of hundreds of kernels, each of which the device
would wait for."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from spool.engine.attention.backends import AttentionBackend, AttentionPlan, Span
from spool.engine.attention.paged_step import GroupStep, PagedStep
from spool.engine.kv.paged_kv import PagedKv
from spool.engine.passes.device import current, host_buffer
from spool.engine.passes.layout import Forward, PreparedPass, TokenBatch
from spool.engine.passes.page_lists import PageLists

Compute = Callable[[], None]
Capture = Callable[[Compute], Callable[[], None]]
"""Makes a computation repeatable, which reads and writes tensors that stay: gives what repeats it."""


class NumberedBackend(AttentionBackend, Protocol):
    """Attention whose plan is numbers alone, so that a graph can be given those of another pass."""

    def numbers(self, spans: Sequence[Span], first_places: Sequence[int]) -> np.ndarray:
        """The plan of a pass, of whose spans the pages begin at these places of a list."""
        ...

    def max_numbers(self, rows: int) -> int:
        """How many numbers a plan of that many rows has at most."""
        ...

    def plan_of(self, numbers: torch.Tensor, pages: torch.Tensor) -> AttentionPlan:
        """`numbers`: int64 on the device, followed by anything. Zeros are the plan of a pass without rows. `pages`: the
        list of pages there."""
        ...


# Numbers for each row: token, position, place in the logits; and a slot for each group of layers.
_ROW_NUMBERS = 3


class GraphedPasses:
    """Passes on the smallest row count with a graph that holds them. A graph computes logits of as many rows as it has.
    All graphs read the same numbers and write the same logits."""

    def __init__(self, compute: Forward, kv: PagedKv, backend: NumberedBackend, capture: Capture) -> None:
        self._compute = compute
        self._device = kv.device
        self._kv = kv
        self._groups = len(kv.groups)
        self._backend = backend
        self._capture = capture
        self._graphs: dict[int, Callable[[], None]] = {}
        self._longest = 0
        self._lists: list[PageLists] = []
        self._inputs = torch.empty(0)
        self._logits = torch.empty(0)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Those that have a graph, ascending."""
        return tuple(sorted(self._graphs))

    @torch.inference_mode()
    def capture(self, row_counts: Sequence[int], longest: int) -> None:
        """Makes graphs, the largest first: smaller ones find room in what it needed. No sequence has more than
        `longest` positions. Raises whatever is raised where a pass cannot be captured; no graph is
        left then."""
        lists, size, device = max(row_counts, default=0), self._kv.page_size, self._device
        self._longest = longest
        self._lists = [PageLists(lists, longest, size, device) for _ in self._kv.groups]
        try:
            with current(device):
                for rows in sorted(row_counts, reverse=True):
                    if not self._graphs:
                        size = sum(self._sizes(rows))
                        self._inputs = torch.zeros(size, dtype=torch.int64, device=device)
                    # A pass of padding alone.
                    slots, plans = [[self._kv.padding_slot] * rows] * self._groups, [()] * self._groups
                    self._write([*[()] * _ROW_NUMBERS, *slots, *plans], self._sizes(rows))
                    if not self._graphs:
                        self._logits = torch.empty_like(self._computed(rows))
                    self._graphs[rows] = self._captured(rows)
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        self._graphs.clear()
        self._lists = []
        self._inputs = torch.empty(0)
        self._logits = torch.empty(0)

    def padded(self, rows: int) -> int | None:
        """The row count of the graph that `rows` rows run on; None where there is none."""
        counts = self.row_counts
        index = bisect_left(counts, rows)
        return counts[index] if index < len(counts) else None

    def prepare(self, batch: TokenBatch) -> PreparedPass | None:
        """None where there is no graph of the batch's row count, or where a sequence is longer than those it is for."""
        rows = batch.padded_rows
        if rows not in self._graphs or any(span.start + span.rows > self._longest for span in batch.spans[0]):
            return None
        started = time.perf_counter()
        plans = [
            self._backend.numbers(spans, lists.first_places(spans))
            for spans, lists in zip(batch.spans, self._lists, strict=True)
        ]
        planning = time.perf_counter() - started
        sizes = self._sizes(rows)
        numbers: list[Sequence[int] | np.ndarray] = [batch.tokens, batch.positions, batch.logits_rows]
        numbers += [*batch.slots, *plans]
        self._write(numbers, [*sizes[:-1], len(plans[-1])])
        if batch.fed is not None:
            self._inputs[: len(batch.fed)].copy_(batch.fed)

        def compute() -> torch.Tensor:
            self._graphs[rows]()
            return self._logits[: len(batch.logits_rows)]

        return PreparedPass(compute, planning)

    def _sizes(self, rows: int) -> list[int]:
        return [*[rows] * (_ROW_NUMBERS + self._groups), *[self._backend.max_numbers(rows)] * self._groups]

    def _write(self, parts: Sequence[Sequence[int] | np.ndarray], sizes: Sequence[int]) -> None:
        """One part of the inputs after the other, each with zeros up to its size."""
        staging = host_buffer([sum(sizes)], torch.int64, self._inputs.device).zero_()
        numbers, end = staging.numpy(), 0
        for part, size in zip(parts, sizes, strict=True):
            numbers[end : end + len(part)] = part
            end += size
        self._inputs[:end].copy_(staging, non_blocking=True)

    def _captured(self, rows: int) -> Callable[[], None]:
        def compute() -> None:
            self._logits[:rows].copy_(self._computed(rows))

        return self._capture(compute)

    def _computed(self, rows: int) -> torch.Tensor:
        sizes = self._sizes(rows)
        tokens, positions, logits_rows, *others = self._inputs[: sum(sizes)].split(sizes)
        plans = map(self._backend.plan_of, others[self._groups :], (lists.pages for lists in self._lists))
        step = PagedStep(self._kv, list(map(GroupStep, others, plans)))
        return self._compute(tokens, positions, logits_rows, step)


class CudaCapture:
    """Graphs of one device, which share the memory of what they compute between their kernels."""

    # Kernels are made, and libraries take their memory, before a capture, in which they may not.
    _FIRST_RUNS = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for all graphs: libraries keep a workspace for each stream that they ever met.
        self._aside = torch.cuda.Stream(device)

    @torch.inference_mode()
    def __call__(self, compute: Compute) -> Callable[[], None]:
        with current(self._device):
            usual, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
            self._aside.wait_stream(usual)
            # A capture that fails leaves its stream the current one; the outer block does not.
            with torch.cuda.stream(self._aside):
                for _ in range(self._FIRST_RUNS):
                    compute()
                # Other threads of the process may use the device meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"):
                    compute()
            usual.wait_stream(self._aside)
        return graph.replay
