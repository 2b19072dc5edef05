"""What sampling a token depends on besides the logits, and how it is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spool.engine.sampling.logits_shaping import SMALLEST_TEMPERATURE, Change, changes_scores, score_changes
from spool.engine.sampling.noise import row_key
from spool.engine.steps import ProposeRow, VerifyRow
from spool.scheduler.sampling import SamplingParameters


class Draw(NamedTuple):
    """How a row's token is drawn: the key of its noise, and the temperature, at 0 of which the largest score wins; and
    the filters, which leave all tokens by default."""

    key: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def draw_of(sampling: SamplingParameters, position: int) -> Draw:
    """How the token at a position is drawn, where nothing changes the scores."""
    if sampling.greedy:
        return Draw()
    temperature = max(sampling.temperature, SMALLEST_TEMPERATURE)
    return Draw(row_key(sampling.seed, position), temperature, sampling.top_k, sampling.top_p, sampling.min_p)


@dataclass(slots=True)
class SamplingContext:
    """What sampling one token depends on besides the logits.

    `position` is the absolute position of the token to sample. `history` is prompt and output before that position;
    only penalties read it. With `must_end`, only the end is left, so that `min_tokens` cannot put it off.
    """

    sampling: SamplingParameters
    position: int
    history: Sequence[int]
    prompt_length: int
    must_end: bool = False

    @property
    def output_tokens(self) -> int:
        """Tokens of output before that position."""
        return self.position - self.prompt_length

    @property
    def changes_scores(self) -> bool:
        """Whether the parameters change this row's logits before temperature."""
        return changes_scores(self.sampling, self.output_tokens, self.must_end)

    def changes(self) -> Iterator[tuple[Change, Mapping[int, float]]]:
        """See `score_changes`."""
        return score_changes(self.sampling, self.history, self.prompt_length, self.output_tokens, self.must_end)

    @property
    def draw(self) -> Draw:
        return draw_of(self.sampling, self.position)

    @classmethod
    def after(cls, row: VerifyRow | ProposeRow, tokens: Sequence[int]) -> SamplingContext:
        """Of the token that follows the row's history and then these."""
        history = [*row.history, *tokens] if row.sampling.uses_history else row.history
        return cls(row.sampling, len(row.history) + len(tokens), history, row.prompt_length)
