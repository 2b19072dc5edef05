"""Small passes on a GPU as CUDA graphs: one call instead of the launch of hundreds of kernels, each of which the device
would wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from transformers import PreTrainedModel

from engine.attention.backends import AttentionBackend, AttentionPlan, Span
from engine.attention.paged_step import PagedStep
from engine.kv.paged_kv import PagedKv
from engine.passes.device import current, pinned
from engine.passes.eager import forward
from engine.passes.layout import PreparedPass, TokenBatch

Compute = Callable[[], torch.Tensor]
Capture = Callable[[Compute], tuple[Callable[[], None], torch.Tensor]]
"""Makes a computation repeatable: what repeats it, and the tensor that each repetition writes its result to."""


class BlockBackend(AttentionBackend, Protocol):
    """Attention whose plan is numbers alone, so that a graph can be given those of another pass."""

    def blocks(self, spans: Sequence[Span]) -> tuple[list[int], list[int]]:
        """Edges, four numbers for each block of rows, and pages."""
        ...

    def plan_of(self, edges: torch.Tensor, pages: torch.Tensor) -> AttentionPlan:
        """Of blocks, int64 `[blocks, 4]`, and pages on the device; a block of zeros is none."""
        ...


# Numbers for each row: token, position, slot, place in the logits; then those of a block's edges.
_ROW_NUMBERS = 4
_EDGE_NUMBERS = 4


@dataclass(frozen=True, slots=True)
class _Graph:
    """`inputs` int64: `_ROW_NUMBERS` lists of the row count, as many blocks, then pages. `logits` of every row."""

    inputs: torch.Tensor
    logits: torch.Tensor
    replay: Callable[[], None]


class GraphedPasses:
    """Passes whose row count has a graph. A graph computes logits of as many rows as it has; blocks and pages that a
    pass does not need are left as none."""

    def __init__(self, model: PreTrainedModel, kv: PagedKv, backend: BlockBackend, capture: Capture) -> None:
        self._model = model
        self._kv = kv
        self._backend = backend
        self._capture = capture
        self._graphs: dict[int, _Graph] = {}

    def capture(self, row_counts: Sequence[int]) -> None:
        """Makes graphs, the largest first: smaller ones find room in what it needed. Raises whatever the model or
        torch raises where the model cannot be captured; no graph is left then."""
        try:
            for rows in sorted(row_counts, reverse=True):
                self._graphs[rows] = self._captured(rows)
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        self._graphs.clear()

    def takes(self, batch: TokenBatch) -> bool:
        """Whether there is a graph of its row count, with room for its pages."""
        if batch.padded_rows not in self._graphs:
            return False
        # Where sequences share pages, their lists can be longer than the pool has pages.
        pages = sum(-(-(span.start + span.rows) // self._kv.page_size) for span in batch.spans)
        return pages <= self._kv.pages

    def prepare(self, batch: TokenBatch) -> PreparedPass:
        graph, rows = self._graphs[batch.padded_rows], batch.padded_rows
        started = time.perf_counter()
        edges, pages = self._backend.blocks(batch.spans)
        planning = time.perf_counter() - started
        numbers = chain(
            batch.tokens,
            batch.positions,
            batch.slots,
            _filled(batch.logits_rows, rows),
            _filled(edges, rows * _EDGE_NUMBERS),
            pages,
        )
        given = pinned(list(numbers), graph.inputs.device)
        graph.inputs[: len(given)].copy_(given, non_blocking=True)

        def compute() -> torch.Tensor:
            graph.replay()
            return graph.logits[: len(batch.logits_rows)]

        return PreparedPass(compute, planning)

    def _captured(self, rows: int) -> _Graph:
        sizes = [*[rows] * _ROW_NUMBERS, rows * _EDGE_NUMBERS, self._kv.pages]
        inputs = torch.zeros(sum(sizes), dtype=torch.int64, device=self._model.device)
        tokens, positions, slots, logits_rows, edges, pages = inputs.split(sizes)
        slots.fill_(self._kv.padding_slot)

        def compute() -> torch.Tensor:
            plan = self._backend.plan_of(edges.view(-1, _EDGE_NUMBERS), pages)
            return forward(self._model, tokens, positions, logits_rows, PagedStep(self._kv, slots, plan))

        replay, logits = self._capture(compute)
        return _Graph(inputs, logits, replay)


class CudaCapture:
    """Graphs of one device, which share the memory of what they compute between their kernels."""

    # Kernels are made, and libraries take their memory, before a capture, in which they may not.
    _FIRST_RUNS = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> tuple[Callable[[], None], torch.Tensor]:
        with torch.inference_mode(), current(self._device):
            usual, aside = torch.cuda.current_stream(), torch.cuda.Stream()
            aside.wait_stream(usual)
            with torch.cuda.stream(aside):
                for _ in range(self._FIRST_RUNS):
                    compute()
            usual.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                result = compute()
        return graph.replay, result


def _filled(numbers: Sequence[int], size: int) -> list[int]:
    return [*numbers, *[0] * (size - len(numbers))]
