"""Prompt lookup: proposes what followed the longest recent match of the last tokens. Needs no model and no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.description import EngineDescription
from engine.packing import make_room
from engine.pages import PagePool
from engine.steps import EngineTimings, ProposeRow, RowOutcome, StepOutcome

MODEL_ID = "ngram"
_LONGEST_MATCH = 4
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
            max_packed_rows=_PAGES,
        )

    def step(self, rows: Sequence[ProposeRow]) -> StepOutcome:
        started = time.perf_counter()
        outcomes = [RowOutcome([]) for _ in rows]
        for index in make_room(self.pool, [(row.table, len(row.tokens)) for row in rows], outcomes):
            row = rows[index]
            proposal = continuation(row.history, row.draft_length)
            # As with a model, the last proposed token is not part of the state yet.
            self.pool.append(row.table, max(0, len(proposal) - 1))
            outcomes[index].tokens = proposal
        fed = sum(len(row.tokens) for row in rows)
        return StepOutcome(outcomes, EngineTimings(forward=time.perf_counter() - started, packed_rows=fed))


def continuation(history: Sequence[int], count: int) -> list[int]:
    """The `count` tokens after the latest earlier place where the longest possible ending of `history` stood."""
    if count < 1:
        return []
    tokens = list(history)
    for length in range(min(_LONGEST_MATCH, len(tokens) - 1), 0, -1):
        ending = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == ending:
                # Copied one by one, so that a match that reaches its own end goes on periodically.
                for _ in range(count):
                    tokens.append(tokens[start + length])
                    start += 1
                return tokens[-count:]
    return []
