"""A record of what every step of a cell had to compute, how long it took, and what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.planning.virtual_cell import pass_tokens
from scheduler.messages import Role, Row, RowResult, SendStep
from services.observability.observer import ServiceObserver, StepTimings


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step and its seconds on the worker.

    `pass_tokens` are the tokens that each of its passes computes: one pass on a target, one for each token of a
    proposal on a draft. `kv_tokens` is the KV that a pass reads. `rows` counts sequences; `decoding` says that none of
    them feeds a prompt.
    """

    seconds: float
    pass_tokens: tuple[int, ...]
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
        self.steps[role].append(
            TimedStep(
                seconds=timings.total,
                pass_tokens=_pass_tokens(role, step.rows),
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


def _pass_tokens(role: Role, rows: Sequence[Row]) -> tuple[int, ...]:
    fed = sum(len(row.tokens) for row in rows)
    if role is Role.TARGET:
        return (fed + sum(len(row.draft_tokens) for row in rows),)
    return tuple(pass_tokens(fed, [row.draft_length for row in rows]))
