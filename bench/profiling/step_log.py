"""A record of what every step of a cell had to compute, how long it took, and what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.messages import Role, Row, RowResult, SendStep
from services.observability.observer import ServiceObserver, StepTimings


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step and its seconds on the worker.

    `passes` is 1 on a target, and one for each token of a proposal on a draft. `tokens` are all that its passes
    compute, `verified` those of them with a choice after them; `kv_tokens` is the KV that one pass reads. `rows` counts
    sequences; `decoding` says that none of them feeds a prompt.
    """

    seconds: float
    passes: int
    tokens: int
    verified: int
    kv_tokens: int
    rows: int
    decoding: bool
    wire: float | None
    """Seconds between sending and answer beyond the step's own; None where the worker had another step then."""
    pause: float | None
    """Seconds from the answer before to this step's sending; None where both overlapped."""


class StepLog(ServiceObserver):
    """Collects the steps of one scheduler service that has a target and a draft worker.

    Of the draft tokens of which all before were accepted, `tried` is the number and `accepted` how many were, too.
    `lost` is the worker that the service has lost, if any.
    """

    def __init__(self) -> None:
        self.steps: dict[Role, list[TimedStep]] = {Role.TARGET: [], Role.DRAFT: []}
        self.accepted = 0
        self.tried = 0
        self._sent: dict[tuple[Role, int], tuple[float, bool]] = {}
        self._answered: dict[Role, float] = {}

    def step_sent(self, role: Role, step: SendStep, now: float) -> None:
        idle = not any(other is role for other, _ in self._sent)
        self._sent[role, step.step_id] = now, idle

    def step_replied(
        self, role: Role, step: SendStep, results: tuple[RowResult, ...], timings: StepTimings, now: float
    ) -> None:
        sent, idle = self._sent.pop((role, step.step_id))
        before = self._answered.get(role)
        self._answered[role] = now
        if not step.rows:
            return
        if role is Role.TARGET:
            self._count(step.rows, results)
        passes, tokens, verified = _work(role, step.rows)
        self.steps[role].append(
            TimedStep(
                seconds=timings.total,
                passes=passes,
                tokens=tokens,
                verified=verified,
                kv_tokens=sum(row.kv_len for row in step.rows),
                rows=len(step.rows),
                decoding=all(row.sample or row.draft_length for row in step.rows),
                wire=now - sent - timings.total if idle else None,
                pause=sent - before if idle and before is not None else None,
            )
        )

    def _count(self, rows: Sequence[Row], results: Sequence[RowResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            self.accepted += result.accepted
            self.tried += result.accepted + (result.accepted < len(row.draft_tokens))


def _work(role: Role, rows: Sequence[Row]) -> tuple[int, int, int]:
    """Passes, tokens, and tokens with a choice after them."""
    fed = sum(len(row.tokens) for row in rows)
    if role is Role.TARGET:
        drafted = sum(len(row.draft_tokens) for row in rows)
        return 1, fed + drafted, drafted + sum(row.sample for row in rows)
    lengths = [row.draft_length for row in rows]
    return max(1, *lengths), fed + sum(max(0, length - 1) for length in lengths), sum(lengths)
