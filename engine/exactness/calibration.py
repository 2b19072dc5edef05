"""Exact mode: finds shapes on which this device gives the same bits for a row, whatever shares the pass with it.

In low precision a matrix kernel's last bits depend on the row count it was called with, and near-ties then flip. Exact
mode keeps every pass to row counts of one class, whose members were seen to give equal bits, and attention to
one form; then it checks whole logits end to end, over several schedules of the same sequences.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from spool.engine.attention.backends import AttentionForm
from spool.engine.cpu.attention import KernelBackend
from spool.engine.cpu.linear import KernelLinear, PrepackedLinear
from spool.engine.errors import ExactModeUnavailableError
from spool.engine.exactness.attention_probe import AttentionProbe
from spool.engine.kv.pages import PagePool, PageTable
from spool.engine.models.source import longest_sequence
from spool.engine.passes.layout import BatchedSequence
from spool.engine.passes.runner import ModelRunner
from spool.engine.settings import EngineSettings

_PROBE_SEED = 20251022
_SHIFTS = (1, 7)
# A class that ends below this cannot verify a draft of usual length.
_MIN_USEFUL_ROWS = 16
# Passes by which classes are priced: of one row, of a few sequences or a draft, and of a batch with drafts.
_PRICED_ROWS = (1, 8, 40)
# Positions up to which attention is probed.
_LONGEST_PROBE = 1024
# Length, and how many of the last positions are compared.
_PROBE_SEQUENCES = ((592, 20), (140, 30), (75, 75), (40, 40), (9, 9))
# Long enough for a pass of the usual largest size, and no longer: kernels that read pages have no other shapes.
_KERNEL_PROBE_SEQUENCES = ((200, 30), *_PROBE_SEQUENCES[2:])

AnyLinear: TypeAlias = nn.Linear | PrepackedLinear | KernelLinear
MakeRunner = Callable[[PagePool, AttentionForm | None, Sequence[int]], ModelRunner]


@dataclass(frozen=True, slots=True)
class ExactShapes:
    """`row_counts`, ascending: every pass and LM head call runs on one of these. `attention`: the form of its calls;
    None where kernels attend, which have but one."""

    row_counts: tuple[int, ...]
    attention: AttentionForm | None


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was chosen, and how many rows of logits were compared with those of plain decoding."""

    shapes: ExactShapes
    checked_logit_rows: int

    def summary(self) -> str:
        counts = self.shapes.row_counts
        form = self.shapes.attention
        return (
            f"{len(counts)} row counts from {counts[0]} to {counts[-1]}, "
            f"attention {'by kernels' if form is None else form.summary()}; "
            f"{self.checked_logit_rows} logit rows bit-equal"
        )


def calibrate(
    model: PreTrainedModel, make_runner: MakeRunner, settings: EngineSettings, forms: Iterable[AttentionForm | None]
) -> Calibration:
    """Tries classes of row counts and `forms` of attention, cheapest first. Raises ExactModeUnavailableError."""
    page_size, max_num_batched_tokens = settings.page_size, settings.batched_tokens
    fewest = min(_MIN_USEFUL_ROWS, max_num_batched_tokens)
    classes = row_count_classes(model, candidate_row_counts(max_num_batched_tokens))
    classes = [members for members in classes if members[-1] >= fewest]
    useful = [
        row_counts
        for members in cheapest_first(classes)
        for row_counts in _thinned(members)
        if row_counts[-1] >= fewest
    ]
    failures: list[str] = []
    for form in forms:
        difference = _attention_difference(model, make_runner, page_size, form, max_num_batched_tokens)
        if difference is not None:
            failures.append(f"{form}: {difference}")
            continue
        for row_counts in useful:
            probe = _EndToEndProbe(model, make_runner, page_size, form, row_counts)
            difference = probe.first_difference()
            if difference is None:
                return Calibration(ExactShapes(row_counts, form), probe.compared)
            failures.append(f"{len(row_counts)} row counts up to {row_counts[-1]} with {form}: {difference}")
        if form is None:
            # Kernels attend in one order by construction: what differs lies elsewhere, where other forms mend nothing.
            break
    raise ExactModeUnavailableError(
        f"exact mode found no shapes that give equal logits on {model.device} in {model.dtype}: "
        f"{'; '.join(failures) or 'no row counts agree'}"
    )


def candidate_row_counts(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Few, close together where they are small."""
    counts = [*range(1, 8), *range(8, 48, 2), *range(48, 96, 8), *range(96, 192, 16)]
    counts += range(192, max_num_batched_tokens + 64, 64)
    return tuple(sorted({min(count, max_num_batched_tokens) for count in counts}))


def _thinned(row_counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All of them, then fewer: what is between the linear layers can have operations of its own for a single row, or
    ask for multiples, of a vector's length say."""
    seen = set()
    several = tuple(count for count in row_counts if count > 1)
    multiples = (tuple(count for count in several if count % multiple == 0) for multiple in (1, 2, 4, 8))
    for members in (row_counts, *multiples):
        if members and members not in seen:
            seen.add(members)
            yield members


@torch.inference_mode()
def row_count_classes(model: PreTrainedModel, candidates: Sequence[int]) -> list[tuple[int, ...]]:
    """Candidates split into classes of equal bits in every distinct linear layer, the class with most members first.

    Every row position is compared, at several offsets: the tail of a tile can run on another kernel than its middle.
    Spool's own kernels are left out: each of their outputs is one chain of sums, in an order that no other row changes
    (engine/cpu/csrc/linear.c).
    """
    classes = [tuple(candidates)]
    like = next(model.parameters())
    for layer in _distinct_linears(model):
        classes = [part for members in classes for part in _split_by_bits(layer, members, like)]
    return sorted(classes, key=lambda members: (len(members), members[-1]), reverse=True)


def cheapest_first(classes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """By the rows that small passes, padded to the counts of a class, compute, and then by the number of passes."""

    def price(members: tuple[int, ...]) -> tuple[int, int]:
        passes = [count for rows in _PRICED_ROWS for count in _padded(rows, members)]
        return sum(passes), len(passes)

    return sorted(classes, key=price)


def _padded(rows: int, members: tuple[int, ...]) -> list[int]:
    """The row counts of the passes that compute `rows` rows."""
    whole, rest = divmod(rows, members[-1])
    return [members[-1]] * whole + ([members[bisect_left(members, rest)]] if rest else [])


def _distinct_linears(model: nn.Module) -> Iterable[AnyLinear]:
    by_shape = {
        (module.in_features, module.out_features, module.bias is not None): module
        for module in model.modules()
        if isinstance(module, AnyLinear) and not isinstance(module, KernelLinear)
    }
    return by_shape.values()


def _split_by_bits(layer: AnyLinear, row_counts: tuple[int, ...], like: torch.Tensor) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(_PROBE_SEED)
    inputs = torch.randn(2 * row_counts[-1], layer.in_features, generator=generator).to(like)
    left = list(row_counts)
    classes = []
    while left:
        # The largest count stands for its class: it computes the reference of every probe row.
        reference = torch.cat([_pass(layer, inputs[: left[-1]]), _pass(layer, inputs[left[-1] : 2 * left[-1]])])
        members = tuple(count for count in left if _agrees(layer, inputs, reference, count))
        if not members:
            left.pop()  # not even equal to itself at another offset
            continue
        classes.append(members)
        left = [count for count in left if count not in members]
    return classes


def _agrees(layer: AnyLinear, inputs: torch.Tensor, reference: torch.Tensor, count: int) -> bool:
    """In low precision few differences outlast the rounding, so that many rows are compared of any count."""
    last = len(reference) - count
    return all(
        torch.equal(_pass(layer, inputs[first : first + count]), reference[first : first + count])
        for first in (*range(0, last + 1, count), *(shift for shift in _SHIFTS if shift <= last))
    )


def _attention_difference(
    model: PreTrainedModel, make_runner: MakeRunner, page_size: int, form: AttentionForm | None, max_rows: int
) -> str | None:
    longest = min(_LONGEST_PROBE, _positions(model))
    longest = form.kv_length(longest) if form else longest
    runner = make_runner(PagePool(AttentionProbe.pages(longest, page_size), page_size), form, ())
    if isinstance(runner.backend, KernelBackend):
        return None  # one order of sums for each query head of a row (engine/cpu/csrc/attention.c)
    probe = AttentionProbe(runner.backend, runner.kv, model.config.num_attention_heads, longest)
    return probe.first_difference(max_rows)


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
        form: AttentionForm | None,
        row_counts: Sequence[int],
    ) -> None:
        positions = _positions(model)
        by_kernels = form is None and model.device.type == "cpu"
        sequences = _KERNEL_PROBE_SEQUENCES if by_kernels else _PROBE_SEQUENCES
        plans = [(min(length, positions), compared) for length, compared in sequences if compared <= positions]
        generator = torch.Generator().manual_seed(_PROBE_SEED)
        vocabulary = model.get_input_embeddings().num_embeddings
        self._sequences = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length, _ in plans]
        self._first_compared = [length - compared for length, compared in plans]
        self._tables = [PageTable() for _ in plans]
        self._pool = PagePool(sum(-(-length // page_size) for length, _ in plans), page_size)
        self._runner = make_runner(self._pool, form, row_counts)
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


def _pass(layer: AnyLinear, rows: torch.Tensor) -> torch.Tensor:
    """`[rows, in]` through the layer in the shape `[1, rows, in]` that passes have."""
    return layer(rows.unsqueeze(0))[0]
