"""A draft model, or prompt lookup, inside the process of its target: what follows the token that was just sampled.

It needs no worker and no message of its own. Its KV lies on pages of its own pool and lags the target's where nobody
has asked for a proposal; a sequence gets none until the draft has caught up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from engine.description import EngineDescription
from engine.drafting.draft_kv import DraftKv
from engine.kv.pages import PagePool
from engine.kv.prefix_cache import PrefixCache
from engine.steps import AheadProposal, Computing, ProposeRow, RowOutcome, StepOutcome, VerifyRow, no_callback

logger = logging.getLogger(__name__)


class Proposer(Protocol):
    """A `DraftEngine` or `NgramEngine`."""

    @property
    def description(self) -> EngineDescription: ...

    @property
    def pool(self) -> PagePool: ...

    def step(self, rows: Sequence[ProposeRow], computing: Computing) -> StepOutcome: ...


class InsideDrafting:
    """A sequence for which there are no pages, which is too long for the draft or with which the draft has failed gets
    no proposal any more; nothing else becomes of it."""

    def __init__(self, draft: Proposer, prefix_cache: bool) -> None:
        """`prefix_cache`: whether sequences that begin alike share pages of the draft."""
        self._draft = draft
        self._prefixes = PrefixCache(draft.pool) if prefix_cache else None
        self._drafts = True
        """Whether the last rows that sampled asked for proposals, so that prompts are worth feeding."""
        self._failed = False

    def follow(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome]) -> float:
        """After a pass of the target over `rows`: adds to the outcomes what the rows ask for, `AheadProposal`s of a
        token or more. Gives the seconds that it took."""
        started = time.perf_counter()
        sampling = [row.draft_length for row in rows if row.sample]
        if sampling:
            self._drafts = any(sampling)
        if self._drafts:
            asked = [(row, outcome) for row, outcome in zip(rows, outcomes, strict=True) if _is_fed(row, outcome)]
            try:
                self._propose(asked)
            except Exception:
                logger.error("the draft failed; these sequences go on without", exc_info=not self._failed)
                self._failed = True
                for row, _ in asked:
                    self._give_up(row.draft_kv, distrusted=True)
        return time.perf_counter() - started

    def _propose(self, asked: Sequence[tuple[VerifyRow, RowOutcome]]) -> None:
        longest, room = self._draft.description.max_sequence_length, self._draft.description.max_num_batched_tokens
        lagging: list[tuple[Sequence[int], VerifyRow, RowOutcome]] = []
        for row, outcome in asked:
            kv = row.draft_kv
            valid = kv.meet(row.history, outcome.tokens)
            if len(kv.known) > longest:
                self._give_up(kv)
            else:
                # The last token is fed in any case, for its logits.
                missing = kv.begin(self._draft.pool, min(valid, len(kv.known) - 1), self._prefixes)
                lagging.append((missing, row, outcome))
        fed: list[tuple[VerifyRow, RowOutcome]] = []
        proposing: list[ProposeRow] = []
        for missing, row, outcome in sorted(lagging, key=lambda one: len(one[0])):
            kv, tokens = row.draft_kv, missing[:room]
            room -= len(tokens)
            length = min(row.draft_length, longest + 1 - len(kv.known)) if len(tokens) == len(missing) else 0
            if tokens:
                fed.append((row, outcome))
                asking = ProposeRow(kv.table, tokens, length, kv.known, row.prompt_length, row.sampling)
                asking.places, asking.grammar_state = kv.places, kv.grammar_state
                proposing.append(asking)
        results = self._draft.step(proposing, no_callback).rows if proposing else []
        for (row, outcome), asking, result in zip(fed, proposing, results, strict=True):
            if result.error is not None:
                self._give_up(row.draft_kv, distrusted=not result.out_of_pages)
                continue
            row.draft_kv.end(self._draft.pool, [*asking.tokens, *result.tokens[:-1]], self._prefixes)
            if result.tokens:
                ahead = AheadProposal(outcome.accepted, outcome.tokens[-1], result.tokens)
                outcome.ahead.append(ahead)

    def _give_up(self, kv: DraftKv, distrusted: bool = False) -> None:
        if distrusted and self._prefixes is not None:
            self._prefixes.forget(kv.table)
        kv.given_up = True
        kv.drop()


def _is_fed(row: VerifyRow, outcome: RowOutcome) -> bool:
    """Where a row samples and asks for nothing, as in plain rounds, the draft is left to lag."""
    if outcome.error is not None or row.draft_kv.given_up:
        return False
    grammar = row.sampling.grammar
    ended = grammar is not None and bool(outcome.tokens) and outcome.tokens[-1] in grammar.end_token_ids
    return not row.sample or (row.draft_length > 0 and not ended)
