"""The draft engine: a small model that proposes tokens one by one, keeping its KV from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor

from spool.engine.description import EngineDescription
from spool.engine.kv.pages import PagePool
from spool.engine.passes.admission import make_room, rolled_back_on_error, split_by_rows
from spool.engine.passes.chained import ChainedPasses
from spool.engine.passes.layout import BatchedSequence
from spool.engine.passes.runner import ModelRunner
from spool.engine.sampling.context import SamplingContext
from spool.engine.sampling.grammars import GrammarRow, Grammars, TokenMasks
from spool.engine.sampling.logits_scan import LogitsScan
from spool.engine.sampling.logits_shaping import changes_scores
from spool.engine.sampling.sampler import choose_alternatives, choose_tokens
from spool.engine.settings import LONGEST_LOOKUP_MATCH
from spool.engine.steps import Computing, EngineTimings, Interrupted, ProposeRow, RowOutcome, StepOutcome, no_callback


class DraftEngine:
    """Proposes tokens batch by batch; see `ProposeRow` and `RowOutcome` for what goes in and comes out.

    The draft samples with the target's sampling parameters and the same noise, so that its guesses tend to be the
    target's tokens (coupled sampling, arXiv 2408.07978). `token_ids` names the tokens of the columns of the model's
    logits, where those are not the whole vocabulary. With `lookup_match`, a row proposes the tokens that followed an
    earlier occurrence of at least that many of its last tokens, and the model only computes their KV. With `grammars`,
    a row that has a grammar proposes what it allows, and what it forces without the model's choice. If `chained`,
    proposals without grammars are read from the device once all of their tokens are chosen; penalties then count none
    of them.
    """

    def __init__(
        self,
        description: EngineDescription,
        runner: ModelRunner,
        pool: PagePool,
        scan: LogitsScan,
        token_ids: Tensor | None = None,
        lookup_match: int | None = None,
        grammars: Grammars | None = None,
        chained: bool = False,
    ) -> None:
        self.description = description
        self.pool = pool
        self._runner = runner
        self._scan = scan
        self._token_ids = token_ids
        self._lookup_match = lookup_match
        self._grammars = grammars
        limit, size = description.max_num_batched_tokens, description.vocabulary_size
        self._chained = ChainedPasses(runner, limit, size, scan, token_ids) if chained else None

    @property
    def device_lost(self) -> bool:
        return self._runner.device_lost

    def step(
        self,
        rows: Sequence[ProposeRow],
        computing: Computing = no_callback,
        interrupted: Interrupted | None = None,
    ) -> StepOutcome:
        """One step: a pass over the missing tokens, then one for each further token proposed, unless `interrupted`;
        `computing` is called for each.

        A row without pages for its missing tokens fails alone; one that runs out while proposing proposes less.
        """
        outcomes = [RowOutcome([]) for _ in rows]
        timings = EngineTimings()
        with rolled_back_on_error(self.pool, [row.table for row in rows]) as starts:
            drafting = make_room(self.pool, [(row.table, len(row.tokens)) for row in rows], outcomes)
            feed = {index: self._first_feed(rows[index], outcomes[index]) for index in drafting}
            if self._chained is not None and all(self._is_plain(rows[index]) for index in drafting):
                self._chain(self._chained, rows, drafting, feed, outcomes, timings, computing, interrupted)
                drafting = []
            while drafting:
                at_end = self._pass(rows, drafting, feed, outcomes, timings, computing)
                if interrupted is not None and interrupted():
                    break
                drafting = [i for i in drafting if i not in at_end and self._goes_on(rows[i], outcomes[i])]
                feed = {index: outcomes[index].tokens[-1:] for index in drafting}
            for row, outcome, start in zip(rows, outcomes, starts, strict=True):
                if outcome.error is not None and not outcome.out_of_pages:
                    self._runner.discard(self.pool, row.table, start)
        return StepOutcome(outcomes, timings)

    def _first_feed(self, row: ProposeRow, outcome: RowOutcome) -> Sequence[int]:
        """What the row feeds in the first pass: its missing tokens and what is proposed without the model's choice, but
        for the last token of a whole proposal."""
        outcome.tokens = self._known_proposal(row)
        outcome.alternatives = [-1] * len(outcome.tokens)
        ahead = outcome.tokens[: row.draft_length - 1]
        if not ahead:
            return row.tokens
        self.pool.append(row.table, len(ahead))
        return [*row.tokens, *ahead]

    def _known_proposal(self, row: ProposeRow) -> list[int]:
        """A proposal that its grammar forces, or out of the row's own history; empty where the model has to make it."""
        length = row.draft_length
        if length < 1 or not self.pool.can_append(row.table, length - 1):
            return []
        if len(row.tokens) + length - 1 > self.description.max_num_batched_tokens:
            return []
        structured = self._structured(row, ())
        if structured is not None and self._grammars is not None:
            forced = self._grammars.forced(structured)[:length]
            if forced:
                return forced
        if self._lookup_match is None:
            return []
        row.places.follow(row.history)
        found = row.places.continuation(length, self._lookup_match, LONGEST_LOOKUP_MATCH)
        if structured is not None and self._grammars is not None and found:
            found = self._grammars.allowed_prefix(structured, found)
        return found

    def _structured(self, row: ProposeRow, proposed: Sequence[int]) -> GrammarRow | None:
        """What the row's grammar is to be asked of; None without a grammar that is followed here."""
        if row.sampling.grammar is None or self._grammars is None:
            return None
        return GrammarRow(row.grammar_state, row.sampling.grammar, [*row.history[row.prompt_length :], *proposed])

    def _pass(
        self,
        rows: Sequence[ProposeRow],
        indices: Sequence[int],
        feed: dict[int, Sequence[int]],
        outcomes: Sequence[RowOutcome],
        timings: EngineTimings,
        computing: Computing,
    ) -> set[int]:
        """Feeds every row its tokens and appends one proposed token to each that wants one. Returns the rows that have
        none to append, because their grammars allow none that the draft knows."""
        at_end: set[int] = set()
        wanting = {index for index in indices if len(outcomes[index].tokens) < rows[index].draft_length}
        sizes, logits = [len(feed[index]) for index in indices], [index in wanting for index in indices]
        limits = self.description.max_num_batched_tokens, self._runner.max_logits
        for batch in split_by_rows(indices, sizes, logits, *limits):
            sampling = [index for index in batch if index in wanting]
            sequences = [BatchedSequence(rows[i].table, feed[i], 1 if i in wanting else 0) for i in batch]
            masking = self._begin_masks(rows, sampling, outcomes)
            result = self._runner.run(sequences, computing)
            timings.add(result.timings)
            if not sampling:
                timings.add_pass(*result.clock.seconds())
                continue
            logits = result.logits[:, : self.description.vocabulary_size]
            contexts = [SamplingContext.after(rows[index], outcomes[index].tokens) for index in sampling]
            if masking is not None:
                self._constrain([rows[index] for index in sampling], logits, contexts, masking.result())
            chosen = choose_tokens(logits, contexts, self._token_ids, self._scan)
            tokens, others = chosen.tolist(), [-1] * len(sampling)
            if any(rows[index].alternatives for index in sampling):
                others = choose_alternatives(logits, contexts, chosen, self._token_ids, self._scan).tolist()
            for place, (index, token, other) in enumerate(zip(sampling, tokens, others, strict=True)):
                if token < 0 and masking is not None and bool(torch.isneginf(logits[place]).all()):
                    at_end.add(index)
                    # The table ends before the proposal's last token, which was fed.
                    if outcomes[index].tokens:
                        self.pool.truncate(rows[index].table, rows[index].table.length - 1)
                else:
                    _record(outcomes[index], token, other)
            timings.add_pass(*result.clock.seconds())
        return at_end

    def _begin_masks(
        self, rows: Sequence[ProposeRow], indices: Sequence[int], outcomes: Sequence[RowOutcome]
    ) -> Future[TokenMasks] | None:
        """For those of the rows that have a grammar, in the order of `indices`; None without any."""
        asked = [self._structured(rows[index], outcomes[index].tokens) for index in indices]
        structured = [row for row in asked if row is not None]
        return self._grammars.masks(structured) if structured and self._grammars is not None else None

    def _constrain(
        self, rows: Sequence[ProposeRow], logits: Tensor, contexts: Sequence[SamplingContext], masks: TokenMasks
    ) -> None:
        """As far as grammars can be followed; where one cannot, the target says so."""
        places = [place for place, row in enumerate(rows) if row.sampling.grammar is not None]
        if any(error is None for error in masks.errors):
            self._scan.forbid(logits, places, masks.allowed, self._token_ids)
        for place in masks.complete:
            contexts[places[place]].must_end = True

    def _is_plain(self, row: ProposeRow) -> bool:
        """Whether every token that the row proposes is one that the scan chooses without a host that waits: what does
        not change logits now does not later."""
        if row.sampling.grammar is not None:
            return False
        changed = changes_scores(row.sampling, len(row.history) - row.prompt_length)
        return self._scan.beside_host or (row.sampling.greedy and not changed)

    def _goes_on(self, row: ProposeRow, outcome: RowOutcome) -> bool:
        if outcome.error is not None or len(outcome.tokens) >= row.draft_length:
            return False
        grammar = row.sampling.grammar
        if grammar is not None and outcome.tokens and outcome.tokens[-1] in grammar.end_token_ids:
            return False
        return self._makes_room(row)

    def _makes_room(self, row: ProposeRow) -> bool:
        """For one more token, if there are pages."""
        if not self.pool.can_append(row.table, 1):
            return False
        self.pool.append(row.table, 1)
        return True

    def _chain(
        self,
        chained: ChainedPasses,
        rows: Sequence[ProposeRow],
        indices: Sequence[int],
        feed: dict[int, Sequence[int]],
        outcomes: Sequence[RowOutcome],
        timings: EngineTimings,
        computing: Computing,
        interrupted: Interrupted | None,
    ) -> None:
        """All passes of the rows. One whose logits are not finite takes room up to its end, as others do."""
        missing = [rows[index].draft_length - len(outcomes[index].tokens) for index in indices]

        firsts = [SamplingContext.after(rows[index], outcomes[index].tokens) for index in indices]

        def context_after(place: int, chosen: int) -> SamplingContext:
            return replace(firsts[place], position=firsts[place].position + chosen)

        def goes_on(place: int, chosen: int) -> bool:
            return chosen < missing[place] and self._makes_room(rows[indices[place]])

        sequences = [
            BatchedSequence(rows[index].table, feed[index], 1 if count > 0 else 0)
            for index, count in zip(indices, missing, strict=True)
        ]
        alternatives = any(rows[index].alternatives for index in indices)
        proposals = chained.run(sequences, context_after, goes_on, timings, computing, alternatives, interrupted)
        for index, proposed in zip(indices, proposals, strict=True):
            for token, other in proposed:
                if outcomes[index].error is None:
                    _record(outcomes[index], token, other)


def _record(outcome: RowOutcome, token: int, alternative: int) -> None:
    if token < 0:
        outcome.error = "the draft's logits are not finite"
    else:
        outcome.tokens.append(token)
        outcome.alternatives.append(alternative)
