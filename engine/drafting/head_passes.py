"""Passes of a drafting head, each from the features that the one before left on the device: no host waits between them.

On a GPU they are CUDA graphs where these hold as many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spool.engine.attention.backends import AttentionBackend
from spool.engine.attention.paged_step import PagedStep
from spool.engine.drafting.head import DraftingHead
from spool.engine.kv.paged_kv import PagedKv
from spool.engine.models.source import Progress
from spool.engine.passes.device import on_device
from spool.engine.passes.eager import EagerPasses
from spool.engine.passes.graphed import GraphedPasses
from spool.engine.passes.layout import Forward, TokenBatch
from spool.engine.passes.warm_up import capture, forgo

MOST_GRAPHED_ROWS = 256
"""Of a head's graph: a row is a sequence, of which as many run by default."""


class HeadPasses:
    def __init__(
        self,
        head: DraftingHead,
        kv: PagedKv,
        backend: AttentionBackend,
        make_graphs: Callable[[Forward], GraphedPasses | None] = lambda _: None,
    ) -> None:
        """`make_graphs`: of what a pass computes, none captured yet."""
        self.kv = kv
        self.backend = backend
        self._head = head
        self._eager = EagerPasses(self._compute, kv, backend, lambda rows: rows)
        self.graphs = make_graphs(self._compute)
        # What graphs read and write.
        rows = 0 if self.graphs is None else MOST_GRAPHED_ROWS
        self._kept = self._features = kv.layers[0].pool.new_zeros(rows, head.hidden_size)

    def capture(self, row_counts: Sequence[int], longest: int, progress: Progress) -> None:
        """As graphs, for sequences of up to `longest` tokens. `row_counts`: those of the model's own."""
        row_counts = [count for count in row_counts if count <= MOST_GRAPHED_ROWS]
        if self.graphs is None or not row_counts:
            return
        progress("capturing CUDA graphs of the head", None)
        failure = capture(self.graphs, row_counts, longest)
        if failure is not None:
            forgo(self.graphs, f"no CUDA graphs of the head, {failure}", progress)

    def begin(self, features: Tensor) -> None:
        """With features `[rows, hidden]`, which the next pass reads."""
        rows = len(features)
        self._features = self._kept if rows <= len(self._kept) else torch.empty_like(features)
        self._features[:rows] = features

    def go_on(self, places: Sequence[int]) -> None:
        """With the features of some rows of the latest pass."""
        self.begin(self._features[on_device(places, self.kv.device)])

    def padded(self, rows: int) -> int:
        graphed = None if self.graphs is None else self.graphs.padded(rows)
        return rows if graphed is None else graphed

    def run(self, batch: TokenBatch) -> Tensor:
        """Logits `[rows, tokens]` of the tokens after the next, on their way, until the next pass."""
        graphed = None if self.graphs is None else self.graphs.prepare(batch)
        return (graphed or self._eager.prepare(batch)).compute()

    def _compute(self, tokens: Tensor, positions: Tensor, logits_rows: Tensor, step: PagedStep) -> Tensor:
        (group,), features = step.groups, self._features[: len(tokens)]
        features.copy_(self._head.outputs(tokens, features, positions, self.kv, group.slots, group.plan))
        return self._head.logits(features[logits_rows])
