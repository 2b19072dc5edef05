"""A draft model inside the process of its target. It needs no worker and no message of its own."""

from __future__ import annotations

from collections.abc import Sequence

from spool.engine.drafting.model_drafting import DraftAsk, ModelDrafting
from spool.engine.drafting.proposer import LocalProposer
from spool.engine.drafting.sequence import SequenceDrafting
from spool.engine.steps import RowOutcome, VerifyRow


class InsideDrafting(LocalProposer):
    """Where a row asks for nothing, as in plain rounds, the draft is left to lag."""

    def __init__(self, drafting: ModelDrafting) -> None:
        self._drafting = drafting

    def offer(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome], digests: Sequence[int]) -> None:
        places = [place for place, row in enumerate(rows) if row.draft_length]
        asked = [_ask(rows[place], outcomes[place]) for place in places]
        for place, answer in zip(places, self._drafting.propose(asked), strict=True):
            rows[place].drafting.keep(digests[place], answer.tokens)

    def forget(self, drafting: SequenceDrafting) -> None:
        super().forget(drafting)
        drafting.kv.drop()


def _ask(row: VerifyRow, outcome: RowOutcome) -> DraftAsk:
    sampled = outcome.tokens[-1:]
    length = row.draft_length if sampled else 0
    return DraftAsk(row.drafting.kv, row.history, sampled, row.prompt_length, row.sampling, length)
