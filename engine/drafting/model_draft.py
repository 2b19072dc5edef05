"""The draft engine: a small model that proposes tokens one by one, keeping its KV from round to round."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.cpu.logits_scan import LogitsScan
from engine.description import EngineDescription
from engine.kv.pages import PagePool
from engine.passes.admission import make_room, rolled_back_on_error, split_by_rows
from engine.passes.layout import BatchedSequence
from engine.passes.runner import ModelRunner
from engine.sampling.sampler import SamplingContext, probabilities_of, sample_tokens
from engine.settings import LONGEST_LOOKUP_MATCH
from engine.steps import Computing, EngineTimings, ProposeRow, RowOutcome, StepOutcome, no_callback

_LOOKED_UP = 0.75
"""Confidence in a token that was looked up: about so many are right (docs/performance.md, by category)."""


class DraftEngine:
    """Proposes tokens batch by batch; see `ProposeRow` and `RowOutcome` for what goes in and comes out.

    The draft samples with the target's sampling parameters and the same noise, so that its guesses tend to be the
    target's tokens (coupled sampling, arXiv 2408.07978). `token_ids` names the tokens of the columns of the model's
    logits, where those are not the whole vocabulary. With `lookup_match`, a row of which at least so many of the last
    tokens stood in its history before proposes what followed them there, and the model only computes their KV.
    """

    def __init__(
        self,
        description: EngineDescription,
        runner: ModelRunner,
        pool: PagePool,
        scan: LogitsScan,
        token_ids: Tensor | None = None,
        lookup_match: int | None = None,
    ) -> None:
        self.description = description
        self.pool = pool
        self._runner = runner
        self._scan = scan
        self._token_ids = token_ids
        self._lookup_match = lookup_match

    def step(self, rows: Sequence[ProposeRow], computing: Computing = no_callback) -> StepOutcome:
        """One step: a pass over the missing tokens, then one for each further token proposed; `computing` is called for
        each.

        A row without pages for its missing tokens fails alone; one that runs out while proposing proposes less.
        """
        outcomes = [RowOutcome([]) for _ in rows]
        timings = EngineTimings()
        with rolled_back_on_error(self.pool, [row.table for row in rows]) as starts:
            drafting = make_room(self.pool, [(row.table, len(row.tokens)) for row in rows], outcomes)
            feed = {index: self._first_feed(rows[index], outcomes[index]) for index in drafting}
            while drafting:
                self._pass(rows, drafting, feed, outcomes, timings, computing)
                drafting = [index for index in drafting if self._goes_on(rows[index], outcomes[index])]
                feed = {index: outcomes[index].tokens[-1:] for index in drafting}
            for row, outcome, start in zip(rows, outcomes, starts, strict=True):
                if outcome.error is not None and not outcome.out_of_pages:
                    self._runner.discard(self.pool, row.table, start)
        return StepOutcome(outcomes, timings)

    def _first_feed(self, row: ProposeRow, outcome: RowOutcome) -> Sequence[int]:
        """What the row feeds in the first pass: its missing tokens and, of a proposal looked up, all but the last."""
        outcome.tokens = self._look_up(row)
        outcome.confidences = [_LOOKED_UP] * len(outcome.tokens)
        ahead = outcome.tokens[:-1]
        if not ahead:
            return row.tokens
        self.pool.append(row.table, len(ahead))
        return [*row.tokens, *ahead]

    def _look_up(self, row: ProposeRow) -> list[int]:
        """A proposal out of the row's own history; empty where the model has to make it."""
        length = row.draft_length
        if self._lookup_match is None or length < 1 or not self.pool.can_append(row.table, length - 1):
            return []
        if len(row.tokens) + length - 1 > self.description.max_num_batched_tokens:
            return []
        row.places.follow(row.history)
        return row.places.continuation(length, self._lookup_match, LONGEST_LOOKUP_MATCH)

    def _pass(
        self,
        rows: Sequence[ProposeRow],
        indices: Sequence[int],
        feed: dict[int, Sequence[int]],
        outcomes: Sequence[RowOutcome],
        timings: EngineTimings,
        computing: Computing,
    ) -> None:
        """Feeds every row its tokens and appends one proposed token to each that wants one."""
        wanting = {index for index in indices if len(outcomes[index].tokens) < rows[index].draft_length}
        for batch in split_by_rows(indices, [len(feed[i]) for i in indices], self.description.max_num_batched_tokens):
            sampling = [index for index in batch if index in wanting]
            sequences = [BatchedSequence(rows[i].table, feed[i], 1 if i in wanting else 0) for i in batch]
            result = self._runner.run(sequences, computing)
            timings.add(result.timings)
            if not sampling:
                timings.add_pass(*result.clock.seconds())
                continue
            contexts = [_context(rows[index], outcomes[index]) for index in sampling]
            logits = result.logits[:, : self.description.vocabulary_size]
            tokens = sample_tokens(logits, contexts, token_ids=self._token_ids, scan=self._scan)
            probabilities = probabilities_of(logits, tokens, self._token_ids, self._scan)
            for index, token, probability in zip(sampling, tokens, probabilities, strict=True):
                _record(outcomes[index], token, probability)
            timings.add_pass(*result.clock.seconds())

    def _goes_on(self, row: ProposeRow, outcome: RowOutcome) -> bool:
        if outcome.error is not None or len(outcome.tokens) >= row.draft_length:
            return False
        if not self.pool.can_append(row.table, 1):
            return False
        self.pool.append(row.table, 1)
        return True


def _context(row: ProposeRow, outcome: RowOutcome) -> SamplingContext:
    history = [*row.history, *outcome.tokens] if row.sampling.uses_history else row.history
    return SamplingContext(row.sampling, len(row.history) + len(outcome.tokens), history, row.prompt_length)


def _record(outcome: RowOutcome, token: int | None, probability: float) -> None:
    if token is None:
        outcome.error = "the draft's logits are not finite"
    else:
        outcome.tokens.append(token)
        outcome.confidences.append(probability)
