r"""A worker that only counts, and sleeps for as long as its steps are to take.

    python -m bench.draft_ahead.paced_worker --role target \
        --settings '{"costs": {"base": 0.006, "row": 0.000016, "draft_base": 0.0008, "draft_row": 0}, "agreement": 0.7}'

Everything around the engine is real. A sequence's first token is its number, by which its luck goes; all others are
`RIGHT` where the target chooses them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.draft_ahead.laws import RANKS
from bench.virtual_time.rates import Costs
from bench.virtual_time.luck import Luck
from engine.description import EngineDescription
from engine.kv.pages import PagePool
from engine.steps import (
    AheadProposal,
    AheadRow,
    Awaited,
    Computing,
    EngineTimings,
    ProposeRow,
    RowOutcome,
    StepOutcome,
    VerifyRow,
)
from scheduler.messages import Role
from services.worker.executor import DraftStepExecutor, StepExecutor, TargetStepExecutor
from services.worker.process import Progress, WorkerArguments, parse_arguments, run_worker

RIGHT, OTHER = 7, 100
_PAGES, _PAGE_SIZE, _LONGEST = 40_000, 16, 100_000


class _Pace:
    """Sleeps until a moment, however long what came before took."""

    def __init__(self, computing: Computing) -> None:
        self._due = self._began = time.perf_counter()
        computing()

    def wait(self, seconds: float) -> None:
        self._due += seconds
        time.sleep(max(0.0, self._due - time.perf_counter()))

    def outcome(self, rows: list[RowOutcome], tokens: int) -> StepOutcome:
        return StepOutcome(rows, EngineTimings(forward=time.perf_counter() - self._began, batched_tokens=tokens))


class PacedEngine:
    """Target and draft engine in one; which of its methods are called says which it is."""

    def __init__(self, costs: Costs, luck: Luck) -> None:
        self.pool = PagePool(_PAGES, _PAGE_SIZE)
        self.description = EngineDescription(
            model_id="paced",
            tokenizer_digest=b"paced",
            vocabulary_size=1_000_000,
            dtype="none",
            device="none",
            page_size=_PAGE_SIZE,
            total_pages=_PAGES,
            max_sequence_length=_LONGEST,
            max_num_batched_tokens=4096,
        )
        self._costs = costs
        self._luck = luck

    def step(self, rows: Sequence[VerifyRow | ProposeRow], computing: Computing) -> StepOutcome:
        pace, costs = _Pace(computing), self._costs
        fed, reading = sum(len(row.tokens) for row in rows), sum(row.table.length for row in rows)
        if isinstance(rows[0], ProposeRow):
            lengths = [row.draft_length for row in rows if isinstance(row, ProposeRow)]
            later = sum(max(0, length - 1) for length in lengths)
            passes = max(1, *lengths)
            pace.wait((costs.draft_base + costs.draft_kv * reading) * passes + costs.draft_row * (fed + later))
        else:
            fed += sum(len(row.draft_tokens) for row in rows if isinstance(row, VerifyRow))
            pace.wait(costs.base + costs.row * fed + costs.kv * reading)
        return pace.outcome([self._run(row) for row in rows], fed)

    def prepare(self, rows: Sequence[AheadRow], computing: Computing, awaited: Awaited) -> StepOutcome:
        pace, costs = _Pace(computing), self._costs
        fed = sum(len(row.tokens) + len(row.assumed) for row in rows)
        pace.wait(costs.draft_base + costs.draft_row * fed)
        length = 0
        while not awaited() and length < max(row.draft_length for row in rows):
            pace.wait(costs.draft_base + costs.draft_row * sum(row.outcomes for row in rows))
            length += 1
        outcomes = []
        for row in rows:
            self.pool.append(row.table, len(row.tokens) + len(row.assumed))
            first = row.table.length - len(row.assumed)
            likeliest = self._luck.likeliest(row.history[0], first, len(row.assumed), row.outcomes)
            proposal = [RIGHT] * min(length, row.draft_length)
            ahead = [
                AheadProposal(accepted, RIGHT if taken else OTHER + rank, proposal, [1.0] * len(proposal))
                for accepted, rank, taken in likeliest
                if proposal
            ]
            outcomes.append(RowOutcome([], ahead=ahead))
        return pace.outcome(outcomes, fed)

    def _run(self, row: VerifyRow | ProposeRow) -> RowOutcome:
        self.pool.append(row.table, len(row.tokens))
        if isinstance(row, ProposeRow):
            self.pool.append(row.table, max(0, row.draft_length - 1))
            return RowOutcome([RIGHT] * row.draft_length, confidences=[1.0] * row.draft_length)
        first, accepted = row.table.length, 0
        for token in row.draft_tokens:
            if token != RIGHT or not self._luck.is_first(row.history[0], first + accepted):
                break
            accepted += 1
        self.pool.append(row.table, accepted)
        return RowOutcome([RIGHT] * (accepted + 1) if row.sample else [], accepted)


def load(arguments: WorkerArguments, progress: Progress) -> StepExecutor[Any]:
    agreement = float(arguments.settings["agreement"])
    engine = PacedEngine(Costs(**arguments.settings["costs"]), Luck(lambda _id, _position: agreement, RANKS))
    return TargetStepExecutor(engine) if arguments.role is Role.TARGET else DraftStepExecutor(engine)


if __name__ == "__main__":
    sys.exit(run_worker(parse_arguments(), load))
