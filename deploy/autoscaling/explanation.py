"""The last decision in words, and in numbers for metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deploy.autoscaling.capacity import CellFigures, Needs
from deploy.autoscaling.decision import Decision, GroupDecision, GroupRules, Rules
from scheduler.messages import Role


@dataclass(frozen=True, slots=True)
class Explained:
    """`sentence` for people, `wanted` replicas of the groups that scale, and all `figures`, finite ones."""

    sentence: str
    wanted: dict[Role, int]
    figures: dict[str, float]


def explain(decision: Decision, figures: CellFigures, rules: Rules) -> Explained:
    """What was decided, and the numbers that it came from."""
    parts = []
    if decision.target is not None and rules.target is not None:
        parts.append(_targets(decision.target, decision.needs, figures, rules.target))
    if decision.draft is not None and rules.draft is not None:
        parts.append(_drafts(decision.draft, decision.needs, figures, rules.draft))
    groups = {Role.TARGET: decision.target, Role.DRAFT: decision.draft}
    wanted = {role: group.wanted for role, group in groups.items() if group is not None}
    return Explained("; ".join(parts), wanted, _numbers(decision, figures))


def _targets(target: GroupDecision, needs: Needs, figures: CellFigures, rules: GroupRules) -> str:
    head = _count(target.wanted, "target")
    if needs.targets is None:
        return f"{head}: no step was measured yet"
    if not needs.sequences:
        return f"{head}: no sequences{_pending(target, rules)}"
    found = _count(round(needs.sequences), "sequence")
    if math.isfinite(figures.seconds_per_token):
        found += f" at {_milliseconds(figures.seconds_per_token)} a token"
    wait = f", the last of {figures.waiting:.0f} that wait in {needs.queue_seconds:.1f} s" if figures.waiting else ""
    held = f"{needs.per_target:.1f} on a target at {_milliseconds(needs.token_seconds)}"
    return f"{head}: {found}{wait}, {held}, need {needs.targets:.2f}{_pending(target, rules)}"


def _drafts(draft: GroupDecision, needs: Needs, figures: CellFigures, rules: GroupRules) -> str:
    head = _count(draft.wanted, "draft")
    if needs.drafts is None:
        return f"{head}: no step was measured yet"
    if not needs.sequences:
        return f"{head}: no sequences{_pending(draft, rules)}"
    accepted = f"acceptance {figures.acceptance:.2f}"
    if not needs.draft_length:
        return f"{head}: {accepted} saves no target worth a draft{_pending(draft, rules)}"
    saved = f"{needs.saved_targets:.2f} targets with {_count(needs.draft_length, 'token')} a round"
    return f"{head}: {accepted} saves {saved}, which needs {needs.drafts:.2f}{_pending(draft, rules)}"


def _pending(group: GroupDecision, rules: GroupRules) -> str:
    """What the need of this moment alone would ask for, where that differs."""
    if group.now.least > group.wanted:
        return f" ({group.now.least} when that has held for {rules.upscale_delay:g} s)"
    if group.now.most < group.wanted and group.at_most > group.now.most:
        return f" ({group.now.most} when that has done for {rules.downscale_delay:g} s)"
    return ""


def _numbers(decision: Decision, figures: CellFigures) -> dict[str, float]:
    needs = decision.needs
    numbers = {
        "sequences": needs.sequences,
        "sequences_per_target": needs.per_target,
        "token_seconds_measured": figures.seconds_per_token,
        "token_seconds_allowed": needs.token_seconds,
        "queue_seconds_expected": needs.queue_seconds,
        "offered_tokens_per_second": figures.offered_tokens_per_second,
        "acceptance": figures.acceptance,
        "target_busy_share": figures.target_busy,
        "draft_busy_share": figures.draft_busy,
        "targets_in_use": figures.targets,
        "drafts_in_use": figures.drafts,
        "targets_needed": needs.targets,
        "drafts_needed": needs.drafts,
        "targets_saved_by_drafts": needs.saved_targets,
        "targets_wanted": decision.target.wanted if decision.target is not None else None,
        "drafts_wanted": decision.draft.wanted if decision.draft is not None else None,
    }
    return {name: float(number) for name, number in numbers.items() if number is not None and math.isfinite(number)}


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
