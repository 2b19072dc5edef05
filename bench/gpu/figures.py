"""From what was recorded to figures. No torch: arithmetic alone."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from bench.gpu.driver import Output, RunRecord
from scheduler.messages import Role


@dataclass(frozen=True, slots=True)
class StreamingLimit:
    """How fast plain decoding could be if it did nothing but read the target's weights, once a step.

    `weight_bytes` are read by a pass, `bytes_per_second` is what a copy within the device's memory reads and writes.
    """

    weight_bytes: int
    bytes_per_second: float

    @property
    def step_seconds(self) -> float:
        return self.weight_bytes / self.bytes_per_second

    def share(self, step_seconds: float) -> float:
        """Of a step's time, what reading the weights at that speed would take: 1 is the limit."""
        return self.step_seconds / step_seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"step_seconds": self.step_seconds}


@dataclass(frozen=True, slots=True)
class CellFigures:
    """Figures of one cell. Times are seconds.

    `tokens` over `seconds`, prefill included. Medians of target steps are of those that verify or decode and prefill
    nothing (`decode_steps` of `target_steps`); they are None where there was none. `committed_per_round` is tokens of
    a round of one sequence, 1 in plain decoding. `equal_outputs` of `compared_outputs` equal the reference.
    """

    tokens: int
    seconds: float
    tokens_per_second: float
    target_steps: int
    decode_steps: int
    target_step_seconds: float | None
    target_prepare_seconds: float | None
    target_forward_seconds: float | None
    target_sample_seconds: float | None
    streaming_share: float | None
    rows_per_step: float | None
    packed_rows_per_step: float | None
    padding_rows_per_step: float | None
    rounds: int
    committed_per_round: float | None
    drafted: int
    accepted: int
    draft_steps: int
    draft_step_seconds: float | None
    target_share: float
    draft_share: float
    core_share: float
    compared_outputs: int
    equal_outputs: int
    output_digests: list[str]


def summarise(run: RunRecord, reference: Mapping[int, Sequence[int]], limit: StreamingLimit) -> CellFigures:
    """`reference` holds the tokens that sequences should have, of those to compare. Raises KeyError for one not run."""
    target = [step for step in run.steps if step.role is Role.TARGET]
    draft = [step for step in run.steps if step.role is Role.DRAFT]
    decoding = [step for step in target if step.verified == step.rows]
    rounds = [one for output in run.outputs.values() for one in output.rounds]
    tokens = sum(len(output.tokens) for output in run.outputs.values())
    step_seconds = _median([step.total for step in decoding])
    return CellFigures(
        tokens=tokens,
        seconds=run.seconds,
        tokens_per_second=tokens / run.seconds,
        target_steps=len(target),
        decode_steps=len(decoding),
        target_step_seconds=step_seconds,
        target_prepare_seconds=_median([step.prepare for step in decoding]),
        target_forward_seconds=_median([step.forward for step in decoding]),
        target_sample_seconds=_median([step.sample for step in decoding]),
        streaming_share=limit.share(step_seconds) if step_seconds else None,
        rows_per_step=_mean([step.rows for step in decoding]),
        packed_rows_per_step=_mean([step.packed_rows for step in decoding]),
        padding_rows_per_step=_mean([step.padding_rows for step in decoding]),
        rounds=len(rounds),
        committed_per_round=_mean([committed for _, _, committed in rounds]),
        drafted=sum(drafted for drafted, _, _ in rounds),
        accepted=sum(accepted for _, accepted, _ in rounds),
        draft_steps=len(draft),
        draft_step_seconds=_median([step.total for step in draft]),
        target_share=sum(step.total for step in target) / run.seconds,
        draft_share=sum(step.total for step in draft) / run.seconds,
        core_share=run.core_seconds / run.seconds,
        compared_outputs=len(reference),
        equal_outputs=sum(run.outputs[number].tokens == list(right) for number, right in reference.items()),
        output_digests=[output_digest(run.outputs[number].tokens) for number in sorted(reference)],
    )


@dataclass(frozen=True, slots=True)
class LogitsComparison:
    """Logits of the same sequences computed in two ways, up to and with the first token that differs: from there on
    the texts are different ones. `first_unequal` is a sequence and a position in its output.
    """

    sequences: int
    equal_sequences: int
    compared_logits: int
    equal_logits: int
    first_unequal: tuple[int, int] | None


def compare_logits(expected: Mapping[int, Output], found: Mapping[int, Output]) -> LogitsComparison:
    """Raises KeyError for a sequence that was not found, ValueError for one without a digest for each token."""
    equal_sequences = compared = equal = 0
    first: tuple[int, int] | None = None
    for number, right in sorted(expected.items()):
        other = found[number]
        for output in (right, other):
            if len(output.logits_digests) != len(output.tokens):
                digests = len(output.logits_digests)
                raise ValueError(f"sequence {number} has {digests} digests, must have {len(output.tokens)}")
        place = _first_difference(right.tokens, other.tokens)
        equal_sequences += place is None
        end = len(right.tokens) if place is None else place + 1
        same = [one == two for one, two in zip(right.logits_digests[:end], other.logits_digests[:end], strict=False)]
        compared += len(same)
        equal += sum(same)
        if first is None and not all(same):
            first = number, same.index(False)
    return LogitsComparison(len(expected), equal_sequences, compared, equal, first)


def output_digest(tokens: Sequence[int]) -> str:
    """Equal for equal output."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:12]


def _first_difference(one: Sequence[int], two: Sequence[int]) -> int | None:
    return next((place for place, (left, right) in enumerate(zip_longest(one, two)) if left != right), None)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
