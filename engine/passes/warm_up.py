"""The first passes of a new runner: libraries make their kernels in them, and CUDA graphs are captured from them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from spool.engine.description import EngineDescription
from spool.engine.errors import one_line
from spool.engine.kv.pages import PagePool, PageTable
from spool.engine.models.source import Progress
from spool.engine.passes.graph_sizes import graphed_row_counts
from spool.engine.passes.graphed import GraphedPasses
from spool.engine.passes.layout import BatchedSequence
from spool.engine.passes.runner import ModelRunner

logger = logging.getLogger(__name__)

# Of a pass where the kernels of logits are the same for all row counts.
_MAX_WARM_LOGITS = 48


def warm_up(longest: int, runner: ModelRunner, pool: PagePool, on_cpu: bool = False) -> None:
    """Runs one pass of each row count, so that libraries make their kernels now and not in the first steps, with logits
    of as many rows as a step computes. No sequence is longer than `longest`. On a CPU, whose kernels
    are the same for all row counts, the smallest and the largest will do."""
    sizes = runner.row_counts
    if on_cpu:
        sizes = tuple(size for size in sizes if size <= longest)
        sizes = sizes[:: max(1, len(sizes) - 1)]
    max_logits = _MAX_WARM_LOGITS if on_cpu else runner.max_logits
    for size in sizes:
        with _rows(size, min(size, max_logits), longest, pool) as sequences:
            runner.run(sequences)


@contextmanager
def _rows(rows: int, logits: int, longest: int, pool: PagePool, vocabulary: int = 1) -> Iterator[list[BatchedSequence]]:
    """Sequences of so many rows together, of which logits of `logits` are wanted. Where one would be longer than
    `longest`, for which the pool has pages, there are several of one text, whose KV lies in the same place."""
    table, length = PageTable(), min(rows, longest)
    pool.append(table, length)
    text = [place % vocabulary for place in range(length)]
    sequences = []
    for start in range(0, rows, length):
        count = min(length, rows - start)
        sequences.append(BatchedSequence(table, text[-count:], min(count, max(0, logits - start))))
    try:
        yield sequences
    finally:
        pool.free(table)


def capture_graphs(
    description: EngineDescription, runner: ModelRunner, pool: PagePool, progress: Progress
) -> EngineDescription:
    """Passes of few rows as CUDA graphs, where there are any, and in exact mode only if they give the same bits. The
    description says which row counts have one, and `progress` hears why none has."""
    graphs = runner.graphs
    if graphs is None:
        return description
    row_counts = graphed_row_counts(runner.row_counts)
    progress(f"capturing CUDA graphs of {len(row_counts)} row counts", None)
    failure = capture(graphs, row_counts, description.max_sequence_length)
    if (
        failure is None
        and description.exact_row_counts
        and not _agree_with_graphs(description, runner, pool, row_counts)
    ):
        failure = "as they give other bits than the same passes without them"
    if failure is not None:
        forgo(graphs, f"no CUDA graphs, {failure}", progress)
    return replace(description, graphed_row_counts=graphs.row_counts)


def capture(graphs: GraphedPasses, row_counts: Sequence[int], longest: int) -> str | None:
    """Captures them, for sequences of up to `longest` tokens. Says why, where that cannot be."""
    try:
        graphs.capture(row_counts, longest)
    # What a model does in a pass may be nothing that can be captured, and torch says so in many ways.
    except Exception as error:  # noqa: BLE001
        return f"as this model's passes cannot be captured: {_reasons(error)}"
    return None


def forgo(graphs: GraphedPasses, message: str, progress: Progress) -> None:
    """Goes on without them."""
    graphs.clear()
    torch.cuda.empty_cache()
    logger.warning("%s", message)
    progress(message, None)


def _reasons(error: BaseException | None) -> str:
    """All of a chain of errors: what ends a broken capture raises one of its own."""
    reasons = []
    while error is not None:
        reasons.append(one_line(error))
        error = error.__context__
    return ", after ".join(reasons)


def _agree_with_graphs(
    description: EngineDescription, runner: ModelRunner, pool: PagePool, row_counts: Sequence[int]
) -> bool:
    """Whether passes of the most and of the fewest rows that run on each graph give the bits that they give without."""
    without = ModelRunner(runner.model, runner.kv, runner.backend, runner.row_counts)
    for rows in sorted({*row_counts, 1, *(count + 1 for count in row_counts[:-1])}):
        with _rows(rows, rows, description.max_sequence_length, pool, description.vocabulary_size) as sequences:
            graphed = runner.run(sequences).logits.clone()
            if not torch.equal(graphed, without.run(sequences).logits):
                return False
    return True
