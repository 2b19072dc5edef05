"""Passes of any row count, computed operation by operation."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain

import torch
from transformers import PreTrainedModel

from spool.engine.attention.backends import AttentionBackend
from spool.engine.attention.paged_step import GroupStep, PagedStep
from spool.engine.cpu.fused_layers import KernelDecoder
from spool.engine.kv.paged_kv import PagedKv
from spool.engine.passes.device import on_device
from spool.engine.passes.layout import Forward, PreparedPass, TokenBatch


class EagerPasses:
    def __init__(self, compute: Forward, kv: PagedKv, backend: AttentionBackend, padded: Callable[[int], int]) -> None:
        """`padded` gives the row count that a number of rows of logits is computed on."""
        self._compute = compute
        self._device = kv.device
        self._kv = kv
        self._backend = backend
        self._padded = padded

    def prepare(self, batch: TokenBatch) -> PreparedPass:
        # A pass that wants no logits (prefill chunks alone) still pays for the smallest head call.
        wanted = len(batch.logits_rows)
        logits_rows = [*batch.logits_rows, *[0] * (self._padded(max(wanted, 1)) - wanted)]
        numbers = [*batch.tokens, *batch.positions, *chain(*batch.slots), *logits_rows]
        sizes = [*[batch.padded_rows] * (2 + len(batch.slots)), len(logits_rows)]
        tokens, positions, *slots, head_rows = on_device(numbers, self._device).split(sizes)
        if batch.fed is not None:
            tokens[: len(batch.fed)].copy_(batch.fed)
        started = time.perf_counter()
        plans = [self._backend.plan(spans, batch.padded_rows) for spans in batch.spans]
        step = PagedStep(self._kv, list(map(GroupStep, slots, plans)))
        planning = time.perf_counter() - started
        return PreparedPass(lambda: self._compute(tokens, positions, head_rows, step)[:wanted], planning)


def forward(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    logits_rows: torch.Tensor,
    step: PagedStep,
) -> torch.Tensor:
    """Logits `[logits_rows, vocabulary]` of one pass over a batch; all but `step` int64 on the model's device."""
    decoder = model.base_model
    if isinstance(decoder, KernelDecoder):
        # What the model does around it takes a tenth as long as a small pass.
        rows = decoder.normed(tokens, positions, step).index_select(0, logits_rows)
        return decoder.logits(model.get_output_embeddings()(rows))
    output = model(
        input_ids=tokens.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        past_key_values=step,
        paged_step=step,
        use_cache=True,
        logits_to_keep=logits_rows,
    )
    return output.logits[0]
