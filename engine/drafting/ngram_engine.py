"""Prompt lookup: proposes what followed the longest recent match of the last tokens. Needs no model and no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.description import EngineDescription
from engine.kv.pages import PagePool
from engine.passes.admission import make_room
from engine.settings import LONGEST_LOOKUP_MATCH
from engine.steps import (
    AheadRow,
    Awaited,
    Computing,
    EngineTimings,
    ProposeRow,
    RowOutcome,
    StepOutcome,
    never_awaited,
    no_callback,
)

MODEL_ID = "ngram"
# A single token that stood before is seldom followed by the same again, less often than pays for a row of a full batch.
_SHORTEST_MATCH = 2
_PAGE_SIZE = 16
# It keeps no KV; the pages only carry the lengths that the protocol speaks of.
_PAGES = 1 << 18


class NgramEngine:
    """Looks like a `DraftEngine`. Works with any vocabulary; a row without a match proposes nothing."""

    def __init__(self) -> None:
        self.pool = PagePool(_PAGES, _PAGE_SIZE)
        self.description = EngineDescription(
            model_id=MODEL_ID,
            tokenizer_digest=b"",
            vocabulary_size=0,
            dtype="",
            device="cpu",
            page_size=_PAGE_SIZE,
            total_pages=_PAGES,
            max_sequence_length=_PAGES * _PAGE_SIZE,
            max_num_batched_tokens=_PAGES,
        )

    @property
    def device_lost(self) -> bool:
        return False

    def step(self, rows: Sequence[ProposeRow], computing: Computing = no_callback) -> StepOutcome:
        computing()
        started = time.perf_counter()
        outcomes = [RowOutcome([]) for _ in rows]
        for index in make_room(self.pool, [(row.table, len(row.tokens)) for row in rows], outcomes):
            row = rows[index]
            row.places.follow(row.history)
            proposal = row.places.continuation(row.draft_length, _SHORTEST_MATCH, LONGEST_LOOKUP_MATCH)
            # As with a model, the last proposed token is not part of the state yet.
            self.pool.append(row.table, max(0, len(proposal) - 1))
            outcomes[index].tokens = proposal
        fed = sum(len(row.tokens) for row in rows)
        return StepOutcome(outcomes, EngineTimings(forward=time.perf_counter() - started, batched_tokens=fed))

    def prepare(
        self, rows: Sequence[AheadRow], computing: Computing = no_callback, awaited: Awaited = never_awaited
    ) -> StepOutcome:
        """Proposes nothing ahead: what a target will choose instead of a looked-up token, only a model can guess."""
        computing()
        outcomes = [RowOutcome([]) for _ in rows]
        make_room(self.pool, [(row.table, len(row.tokens) + len(row.assumed)) for row in rows], outcomes)
        fed = sum(len(row.tokens) + len(row.assumed) for row in rows)
        return StepOutcome(outcomes, EngineTimings(batched_tokens=fed))
