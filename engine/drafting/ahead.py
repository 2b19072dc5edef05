"""Outcomes: what a draft proposes after each likely result of a verification, while the target still computes it.

Of a proposal, a target accepts some tokens and then chooses one itself. The draft computes the whole proposal in one
pass, and so knows how likely each of these results is. For the likeliest ones the sequence is forked: a fork shares the
full pages and has its own last one. All forks of all rows draft together, as rows of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.description import EngineDescription
from engine.kv.pages import OutOfPagesError, PagePool
from engine.passes.admission import make_room, rolled_back_on_error, split_by_rows
from engine.passes.layout import BatchedSequence
from engine.passes.runner import ModelRunner
from engine.sampling.ranking import RankedTokens, ranked_tokens
from engine.sampling.sampler import SamplingContext
from engine.steps import AheadProposal, AheadRow, Awaited, Computing, EngineTimings, ProposeRow, RowOutcome, StepOutcome

Propose = Callable[[Sequence[ProposeRow], Computing, Awaited], StepOutcome]
"""A step of a draft that ends after the pass during which it became awaited."""


@dataclass(frozen=True, slots=True)
class _Result:
    """A result of the verification of a row, by its place in the step: the first `accepted` tokens, then `token`."""

    row: int
    accepted: int
    token: int
    chance: float


class AheadDrafting:
    """Steps of `AheadRow`s; `token_ids` as in `DraftEngine`."""

    def __init__(
        self,
        description: EngineDescription,
        runner: ModelRunner,
        pool: PagePool,
        token_ids: Tensor | None,
        propose: Propose,
    ) -> None:
        self._description = description
        self._runner = runner
        self._pool = pool
        self._token_ids = token_ids
        self._propose = propose

    def step(self, rows: Sequence[AheadRow], computing: Computing, awaited: Awaited) -> StepOutcome:
        """A pass over tokens and assumed ones, then one for each token proposed; `computing` is called for each.

        A row without pages for its tokens and the assumed ones fails alone, as does one whose logits are not finite.
        Where pages run out, the less likely results have no proposal or a shorter one. Once `awaited`, only what feeds
        rows is computed.
        """
        outcomes = [RowOutcome([]) for _ in rows]
        timings = EngineTimings()
        with rolled_back_on_error(self._pool, [row.table for row in rows]) as starts:
            needs = [(row.table, len(row.tokens) + len(row.assumed)) for row in rows]
            admitted = make_room(self._pool, needs, outcomes)
            results = self._feed(rows, admitted, outcomes, timings, computing, awaited)
            for row, outcome, start in zip(rows, outcomes, starts, strict=True):
                if outcome.error is not None and not outcome.out_of_pages:
                    self._runner.discard(self._pool, row.table, start)
            forks: list[ProposeRow] = []
            try:
                if not awaited():
                    self._fork(rows, results, forks)
                proposed = self._propose(forks, computing, awaited)
            finally:
                for fork in forks:
                    self._pool.free(fork.table)
        timings.add(proposed.timings)
        for result, of_fork in zip(results, proposed.rows, strict=False):
            if of_fork.tokens and of_fork.error is None:
                proposal = AheadProposal(result.accepted, result.token, of_fork.tokens)
                outcomes[result.row].ahead.append(proposal)
        return StepOutcome(outcomes, timings)

    def _feed(
        self,
        rows: Sequence[AheadRow],
        indices: Sequence[int],
        outcomes: Sequence[RowOutcome],
        timings: EngineTimings,
        computing: Computing,
        awaited: Awaited,
    ) -> list[_Result]:
        """Feeds every row; the results to prepare for, the likeliest of all rows first."""
        results: list[_Result] = []
        sizes = [len(rows[i].tokens) + len(rows[i].assumed) for i in indices]
        logits = [0 if rows[i].sampling.grammar else len(rows[i].assumed) + 1 for i in indices]
        wanted = dict(zip(indices, logits, strict=True))
        limits = self._description.max_num_batched_tokens, self._runner.max_logits
        for batch in split_by_rows(indices, sizes, logits, *limits):
            guessing = [index for index in batch if wanted[index]]
            tokens = [[*rows[index].tokens, *rows[index].assumed] for index in batch]
            fed = zip(batch, tokens, strict=True)
            sequences = [BatchedSequence(rows[index].table, each, wanted[index]) for index, each in fed]
            result = self._runner.run(sequences, computing)
            timings.add(result.timings)
            if guessing and not awaited():
                results += self._guess(rows, guessing, result.logits, outcomes)
            timings.add_pass(*result.clock.seconds())
        return sorted(results, key=lambda result: (-result.chance, result.row, result.accepted, result.token))

    def _guess(
        self, rows: Sequence[AheadRow], indices: Sequence[int], logits: Tensor, outcomes: Sequence[RowOutcome]
    ) -> list[_Result]:
        """`logits` are those after the last of `tokens` and after each assumed token of each of the rows."""
        contexts: list[SamplingContext] = []
        assumed: list[int | None] = []
        for index in indices:
            row = rows[index]
            contexts += [SamplingContext.after(row, row.assumed[:accepted]) for accepted in range(len(row.assumed) + 1)]
            assumed += [*row.assumed, None]
        most = max(rows[index].outcomes for index in indices)
        logits = logits[:, : self._description.vocabulary_size]
        ranked = iter(ranked_tokens(logits, contexts, assumed, most, self._token_ids))
        results: list[_Result] = []
        for index in indices:
            places = [next(ranked) for _ in range(len(rows[index].assumed) + 1)]
            finite = [place for place in places if place is not None]
            if len(finite) < len(places):
                outcomes[index].error = "the draft's logits are not finite"
            else:
                results += _likeliest(index, finite, rows[index].outcomes)
        return results

    def _fork(self, rows: Sequence[AheadRow], results: Sequence[_Result], forks: list[ProposeRow]) -> None:
        """Adds a sequence as it is after each of the results, as far as pages last."""
        copies: list[tuple[int, int]] = []
        for result in results:
            row = rows[result.row]
            length = row.table.length - len(row.assumed) + result.accepted
            try:
                table, copied = self._pool.fork(row.table, length)
            except OutOfPagesError:
                break
            history = [*row.history, *row.assumed[: result.accepted], result.token]
            forks.append(ProposeRow(table, [result.token], row.draft_length, history, row.prompt_length, row.sampling))
            copies += copied
        self._runner.kv.copy_pages(copies)


def _likeliest(row: int, places: Sequence[RankedTokens], count: int) -> list[_Result]:
    """Up to `count` results of a row, at whose `places` the share is that of the assumed token."""
    results: list[_Result] = []
    reached = 1.0
    for accepted, place in enumerate(places):
        results += [_Result(row, accepted, token, reached * share) for token, share in place.likeliest]
        reached *= place.share
    possible = [result for result in results if result.chance > 0]
    return sorted(possible, key=lambda result: (-result.chance, result.accepted, result.token))[:count]
