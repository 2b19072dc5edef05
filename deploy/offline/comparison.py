"""Compares what speculation gave with what plain decoding gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from spool.deploy.offline.decoding import Completion, Job
from spool.services.text.tokenizer import ModelTokenizer

_CONTEXT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where a sequence differs, with what was expected and found there in words.

    `position` counts output tokens from 0.
    """

    index: int
    position: int
    context: str
    expected: str
    found: str

    def __str__(self) -> str:
        place = f"prompt {self.index}, output token {self.position}, after {self.context!r}"
        return f"{place}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of the sequences, how many are the same; of the logits that can be compared, how many are the same bit for bit.

    Logits can be compared up to and with the first token that differs: after it they continue different texts.
    """

    sequences: int
    equal_sequences: int
    compared_logits: int
    equal_logits: int
    first_divergence: Divergence | None
    first_unequal_logits: tuple[int, int] | None = None
    """Index of the prompt and position in its output."""

    @property
    def exact_match(self) -> float:
        return self.equal_sequences / self.sequences if self.sequences else 1.0

    @property
    def logits_bit_equal(self) -> float:
        return self.equal_logits / self.compared_logits if self.compared_logits else 1.0

    def to_json(self) -> dict[str, Any]:
        return {"exact_match": self.exact_match, "logits_bit_equal": self.logits_bit_equal} | asdict(self)


def compare(
    jobs: Sequence[Job],
    expected: Sequence[Completion],
    found: Sequence[Completion],
    tokenizer: ModelTokenizer,
) -> Comparison:
    """All three in one order."""
    equal_sequences = compared = equal_logits = 0
    first: Divergence | None = None
    unequal: tuple[int, int] | None = None
    for job, right, other in zip(jobs, expected, found, strict=True):
        place = _first_difference(right.tokens, other.tokens)
        end = len(right.tokens) if place is None else place + 1
        same = [one == two for one, two in zip(right.logits_digests[:end], other.logits_digests[:end], strict=False)]
        compared += len(same)
        equal_logits += sum(same)
        if unequal is None and not all(same):
            unequal = (job.prompt.index, same.index(False))
        equal_sequences += place is None
        if place is not None and first is None:
            first = _divergence(job, right.tokens, other.tokens, place, tokenizer)
    return Comparison(len(jobs), equal_sequences, compared, equal_logits, first, unequal)


def _first_difference(one: Sequence[int], two: Sequence[int]) -> int | None:
    for place, (left, right) in enumerate(zip_longest(one, two)):
        if left != right:
            return place
    return None


def _divergence(
    job: Job,
    expected: Sequence[int],
    found: Sequence[int],
    place: int,
    tokenizer: ModelTokenizer,
) -> Divergence:
    def text(tokens: Sequence[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=False)

    def named(tokens: Sequence[int]) -> str:
        return f"{text(tokens[place : place + 1])!r} (token {tokens[place]})" if place < len(tokens) else "the end"

    context = text([*job.tokens, *expected[:place]][-_CONTEXT_TOKENS:])
    return Divergence(job.prompt.index, place, context, named(expected), named(found))
