"""Stands between a worker and its engine: holds steps up, and writes down what was proposed and accepted."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from spool.engine.steps import Computing, StepOutcome, VerifyRow
from spool.services.worker.executor import StepExecutor
from tests.support.waiting import LONG


class Gate:
    """Lets steps through: all of them, or as many as are allowed."""

    def __init__(self) -> None:
        self._allowed: int | None = None
        self._changed = threading.Condition()

    def open(self) -> None:
        self._set(None)

    def close(self, but_for: int = 0) -> None:
        self._set(but_for)

    def pass_through(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._allowed != 0, LONG)
            if self._allowed is not None:
                self._allowed -= 1

    def _set(self, allowed: int | None) -> None:
        with self._changed:
            self._allowed = allowed
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """One verified proposal, of the sequence whose tokens were `history`. `tokens` are what the target chose."""

    history: tuple[int, ...]
    drafted: int
    accepted: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class WatchedEngine:
    """What the engine of a target did, from the place of its executor."""

    gate: Gate = field(default_factory=Gate)
    drafts: list[VerifiedDraft] = field(default_factory=list)

    def watch(self, executor: StepExecutor) -> None:
        step = executor.engine.step

        def watched(rows: Sequence[VerifyRow], computing: Computing) -> StepOutcome:
            computing()
            self.gate.pass_through()
            histories = [tuple(row.history) for row in rows]
            outcome: StepOutcome = step(rows, computing)
            for row, history, result in zip(rows, histories, outcome.rows, strict=True):
                if row.draft_tokens and result.error is None:
                    tokens = tuple(result.tokens)
                    self.drafts.append(VerifiedDraft(history, len(row.draft_tokens), result.accepted, tokens))
            return outcome

        executor.engine.step = watched  # type: ignore[method-assign]
