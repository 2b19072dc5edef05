"""One draft model and the KV of the sequences that it drafts for: inside a target's process, or in a draft worker.

Its KV lies on pages of its own pool and lags where nobody has asked for a proposal; a sequence gets none until the
draft has caught up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from spool.engine.description import EngineDescription
from spool.engine.drafting.draft_kv import DraftKv
from spool.engine.errors import DeviceLostError, one_line
from spool.engine.kv.pages import PagePool
from spool.engine.kv.prefix_cache import PrefixCache
from spool.engine.steps import Computing, Interrupted, ProposeRow, StepOutcome, no_callback
from spool.scheduler.sampling import SamplingParameters

logger = logging.getLogger(__name__)


class Draft(Protocol):
    """A `DraftEngine`."""

    @property
    def description(self) -> EngineDescription: ...

    @property
    def pool(self) -> PagePool: ...

    @property
    def device_lost(self) -> bool: ...

    def step(
        self, rows: Sequence[ProposeRow], computing: Computing, interrupted: Interrupted | None
    ) -> StepOutcome: ...


@dataclass(slots=True)
class DraftAsk:
    """Propose up to `draft_length` tokens (0: only compute KV) after `history` and the tokens `sampled` behind it, with
    their `alternatives` (`RowOutcome`) if asked. No verdict takes back the first `settled` tokens, by default the
    history."""

    kv: DraftKv
    history: Sequence[int]
    sampled: Sequence[int]
    prompt_length: int
    sampling: SamplingParameters
    draft_length: int
    settled: int | None = None
    alternatives: bool = False


@dataclass(slots=True)
class DraftAnswer:
    """`behind` counts the tokens whose KV is still missing: ask again for them. Once `refused`, the sequence gets no
    proposal any more."""

    tokens: Sequence[int] = ()
    behind: int = 0
    refused: bool = False
    alternatives: Sequence[int] = ()


class ModelDrafting:
    """A sequence for which there are no pages, which is too long for the draft or with which the draft has failed is
    refused from then on; nothing else becomes of it."""

    def __init__(self, draft: Draft, prefix_cache: bool) -> None:
        """`prefix_cache`: whether sequences that begin alike share pages of the draft."""
        self.description = draft.description
        self._draft = draft
        self._prefixes = PrefixCache(draft.pool) if prefix_cache else None
        self._failed = False

    @property
    def free_pages(self) -> int:
        return self._draft.pool.free_pages

    def propose(
        self,
        asked: Sequence[DraftAsk],
        computing: Computing = no_callback,
        interrupted: Interrupted | None = None,
    ) -> list[DraftAnswer]:
        """An answer to each, from one step of the draft: those that lag least come first, and what has no room in the
        step stays behind; a step that is `interrupted` proposes less. Raises DeviceLostError, and nothing else."""
        answers = [DraftAnswer(refused=one.kv.given_up) for one in asked]
        going = [place for place, one in enumerate(asked) if not one.kv.given_up]
        try:
            self._step(asked, going, answers, computing, interrupted)
        except Exception as error:
            if self._draft.device_lost:
                raise DeviceLostError(f"the draft's device is lost: {one_line(error)}") from error
            logger.error("the draft failed; these sequences go on without", exc_info=not self._failed)
            self._failed = True
            for place in going:
                answers[place] = self._refuse(asked[place].kv, distrusted=True)
        return answers

    def _step(
        self,
        asked: Sequence[DraftAsk],
        going: Sequence[int],
        answers: list[DraftAnswer],
        computing: Computing,
        interrupted: Interrupted | None,
    ) -> None:
        longest, room = self.description.max_sequence_length, self.description.max_num_batched_tokens
        lagging: list[tuple[int, Sequence[int]]] = []
        for place in going:
            one, kv = asked[place], asked[place].kv
            valid = kv.meet(one.history, one.sampled)
            if len(kv.known) > longest:
                answers[place] = self._refuse(kv)
            else:
                # Whoever proposes needs the logits of the last token.
                most = len(kv.known) - (one.draft_length > 0)
                missing = kv.begin(self._draft.pool, min(valid, most), self._prefixes)
                lagging.append((place, missing))
        fed: list[int] = []
        rows: list[ProposeRow] = []
        for place, missing in sorted(lagging, key=lambda pair: len(pair[1])):
            one, kv, tokens = asked[place], asked[place].kv, missing[:room]
            room -= len(tokens)
            answers[place].behind = len(missing) - len(tokens)
            length = min(one.draft_length, longest + 1 - len(kv.known)) if len(tokens) == len(missing) else 0
            if tokens:
                fed.append(place)
                row = ProposeRow(kv.table, tokens, length, kv.known, one.prompt_length, one.sampling)
                row.places, row.grammar_state, row.alternatives = kv.places, kv.grammar_state, one.alternatives
                rows.append(row)
        results = self._draft.step(rows, computing, interrupted).rows if rows else []
        for place, row, result in zip(fed, rows, results, strict=True):
            kv, settled = asked[place].kv, asked[place].settled
            if result.error is not None:
                answers[place] = self._refuse(kv, distrusted=not result.out_of_pages)
                continue
            settled = len(asked[place].history) if settled is None else settled
            kv.end(self._draft.pool, [*row.tokens, *result.tokens[:-1]], self._prefixes, settled)
            answers[place].tokens, answers[place].alternatives = result.tokens, result.alternatives

    def _refuse(self, kv: DraftKv, distrusted: bool = False) -> DraftAnswer:
        if distrusted and self._prefixes is not None:
            self._prefixes.forget(kv.table)
        kv.given_up = True
        kv.drop()
        return DraftAnswer(refused=True)
