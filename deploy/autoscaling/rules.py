"""The rules that a configuration sets, and their plain form, in which Serve hands them to the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from deploy.autoscaling.capacity import Goals
from deploy.autoscaling.decision import GroupRules, Rules
from deploy.config.placement import TargetAutoscaling, WorkerAutoscaling
from deploy.config.spool_config import SpoolConfig
from scheduler.messages import Role


def rules_of(config: SpoolConfig) -> Rules:
    """For the groups whose number follows the load; without drafts there is none of theirs."""
    target = config.groups.target.autoscaling
    draft = config.groups.draft.autoscaling if Role.DRAFT in config.roles else None
    holding = target or TargetAutoscaling()
    goals = Goals(
        token_seconds=holding.token_seconds,
        queue_seconds=holding.queue_seconds,
        target_cost=holding.cost,
        draft_cost=(draft or WorkerAutoscaling()).cost,
    )
    return Rules(_group_rules(target), _group_rules(draft), goals)


def _group_rules(scaling: WorkerAutoscaling | None) -> GroupRules | None:
    if scaling is None:
        return None
    return GroupRules(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        upscale_delay=scaling.upscale_delay_seconds,
        downscale_delay=scaling.downscale_delay_seconds,
        utilisation=scaling.utilisation,
        hysteresis=scaling.hysteresis,
    )


def plain_rules(rules: Rules) -> dict[str, Any]:
    """Plain data from which `rules_from_plain` makes the same rules."""
    return asdict(rules)


def rules_from_plain(data: Mapping[str, Any]) -> Rules:
    target, draft = data["target"], data["draft"]
    return Rules(
        GroupRules(**target) if target is not None else None,
        GroupRules(**draft) if draft is not None else None,
        Goals(**data["goals"]),
    )
