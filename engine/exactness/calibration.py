"""Exact mode: finds row counts on which this device gives the same bits for a row, whatever shares the pass with it.

Attention and products are Spool's own kernels, which add up in one order. What a model of another structure than the
Llama kind computes between them is torch's, and may have operations of its own for a single row, or for what does not
fill a vector. So exact mode keeps every pass to row counts of which it has seen, end to end, that whole logits have
equal bits over several schedules of the same sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from transformers import PreTrainedModel

from spool.engine.errors import ExactModeUnavailableError
from spool.engine.kv.pages import PagePool, PageTable
from spool.engine.models.source import longest_sequence
from spool.engine.passes.layout import BatchedSequence
from spool.engine.passes.runner import ModelRunner

_PROBE_SEED = 20251022
# A set of row counts that ends below this cannot verify a draft of usual length.
_MIN_USEFUL_ROWS = 16
# Length, and how many of the last positions are compared. The longest ones are cut where attention on GPUs cuts them.
_PROBE_SEQUENCES = ((592, 20), (140, 30), (75, 75), (40, 40), (9, 9))

MakeRunner = Callable[[PagePool, Sequence[int]], ModelRunner]


@dataclass(frozen=True, slots=True)
class Calibration:
    """`row_counts`, ascending: every pass and LM head call runs on one of these; and how many rows of logits were
    compared with those of plain decoding."""

    row_counts: tuple[int, ...]
    checked_logit_rows: int

    def summary(self) -> str:
        counts = self.row_counts
        return (
            f"{len(counts)} row counts from {counts[0]} to {counts[-1]}; {self.checked_logit_rows} logit rows bit-equal"
        )


def calibrate(
    model: PreTrainedModel, make_runner: MakeRunner, page_size: int, max_num_batched_tokens: int
) -> Calibration:
    """Tries all row counts, then fewer. Raises ExactModeUnavailableError."""
    fewest = min(_MIN_USEFUL_ROWS, max_num_batched_tokens)
    failures: list[str] = []
    for row_counts in _thinned(candidate_row_counts(max_num_batched_tokens)):
        if row_counts[-1] < fewest:
            continue
        probe = _EndToEndProbe(model, make_runner, page_size, row_counts)
        difference = probe.first_difference()
        if difference is None:
            return Calibration(row_counts, probe.compared)
        failures.append(f"{len(row_counts)} row counts up to {row_counts[-1]}: {difference}")
    raise ExactModeUnavailableError(
        f"exact mode found no row counts that give equal logits on {model.device} in {model.dtype}: "
        f"{'; '.join(failures)}"
    )


def candidate_row_counts(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Few, close together where they are small."""
    counts = [*range(1, 8), *range(8, 48, 2), *range(48, 96, 8), *range(96, 192, 16)]
    counts += range(192, max_num_batched_tokens + 64, 64)
    return tuple(sorted({min(count, max_num_batched_tokens) for count in counts}))


def _thinned(row_counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All of them, then fewer: without a single row, then multiples, of a vector's length say."""
    seen = set()
    several = tuple(count for count in row_counts if count > 1)
    multiples = (tuple(count for count in several if count % multiple == 0) for multiple in (1, 2, 4, 8))
    for members in (row_counts, *multiples):
        if members and members not in seen:
            seen.add(members)
            yield members


def _positions(model: PreTrainedModel) -> int:
    """How many positions the model's sequences can have; many, where its configuration does not say."""
    positions = int(getattr(model.config, "max_position_embeddings", 2048))
    return longest_sequence(positions, getattr(model.config, "rope_parameters", None))


class _EndToEndProbe:
    """Computes the logits of a few random sequences by several schedules and compares all of them bit by bit.

    Of each sequence, the logits of the last positions are compared: all of the short ones, few of the longest.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        make_runner: MakeRunner,
        page_size: int,
        row_counts: Sequence[int],
    ) -> None:
        positions = _positions(model)
        plans = [(min(length, positions), compared) for length, compared in _PROBE_SEQUENCES if compared <= positions]
        generator = torch.Generator().manual_seed(_PROBE_SEED)
        vocabulary = model.get_input_embeddings().num_embeddings
        self._sequences = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length, _ in plans]
        self._first_compared = [length - compared for length, compared in plans]
        self._tables = [PageTable() for _ in plans]
        self._pool = PagePool(sum(-(-length // page_size) for length, _ in plans), page_size)
        self._runner = make_runner(self._pool, row_counts)
        self._max_rows = row_counts[-1]
        self.compared = 0

    def first_difference(self) -> str | None:
        """None when all schedules agree; otherwise one line on where they do not."""
        every = list(range(len(self._sequences)))
        schedules = {
            "prefill in chunks of 11": [([index], 11) for index in every],
            "prefill in chunks of 43": [([index], 43) for index in every],
            "prefill in the largest chunks": [([index], self._max_rows) for index in every],
            "verification of 5 rows in a batch": [(every, 5)],
            "verification of 8 rows in a batch": [(every, 8)],
        }
        reference = dict(chain.from_iterable(self._together([index], 1) for index in every))
        for name, batches in schedules.items():
            for key, logits in chain.from_iterable(self._together(*batch) for batch in batches):
                self.compared += 1
                if not torch.equal(logits, reference[key]):
                    return f"{name} differs from plain decoding at position {key[1]} of sequence {key[0]}"
        return None

    def _together(self, indices: Sequence[int], rows: int) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        """Logits of the compared positions, computed `rows` tokens of each sequence a pass; the rest by prefill."""
        rows = min(rows, self._max_rows // len(indices))
        self._prefill(indices, 40 if rows <= 8 else rows)
        while batch := [part for index in indices if (part := self._next(index, rows)) is not None]:
            logits = self._runner.run([sequence for _, sequence in batch]).logits
            for index, sequence in batch:
                part, logits = logits[: sequence.logits], logits[sequence.logits :]
                first = sequence.table.length - sequence.logits
                for offset, row in enumerate(part):
                    if first + offset >= self._first_compared[index]:
                        yield (index, first + offset), row
        for index in indices:
            self._pool.free(self._tables[index])

    def _prefill(self, indices: Sequence[int], rows: int) -> None:
        """Feeds what comes before the compared positions, in whole chunks: the last one may reach into them."""
        rows = min(rows, self._max_rows)
        for index in indices:
            while self._tables[index].length + rows <= self._first_compared[index]:
                part = self._next(index, rows)
                if part is not None:
                    part[1].logits = 0
                    self._runner.run([part[1]])

    def _next(self, index: int, rows: int) -> tuple[int, BatchedSequence] | None:
        table = self._tables[index]
        fed = self._sequences[index][table.length : table.length + rows]
        if not fed:
            return None
        self._pool.append(table, len(fed))
        return index, BatchedSequence(table, fed, len(fed))
