"""What `spool plan` prints, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from deploy.planning.fleets import Planned, System
from deploy.planning.plan_file import PlanFile

Found = Mapping[System, Planned | None]

_LINES = (
    "targets",
    "drafts",
    "price an hour",
    "price of a million tokens",
    "tokens a second",
    "first token p50 / p99, s",
    "token p50 / p99, ms",
    "busy targets / drafts",
    "draft tokens / tokens a round",
)


def table(found: Found) -> Table:
    """A column for each system; dashes where none of its fleets keeps the service level."""
    shown = Table("", *(system.value for system in found))
    columns = [_column(planned) if planned else ["-"] * len(_LINES) for planned in found.values()]
    for line in zip(_LINES, *columns, strict=True):
        shown.add_row(*line)
    return shown


def _column(planned: Planned) -> list[str]:
    fleet, figures = planned.fleet, planned.figures
    drafts = {
        System.PLAIN: "none",
        System.APART: f"{fleet.drafts} x {fleet.draft.name}",
        System.COLOCATED: "on the targets",
    }
    return [
        f"{fleet.targets} x {fleet.target.name}",
        drafts[fleet.system],
        f"{fleet.price:.2f}",
        f"{planned.price_per_million:.2f}",
        f"{figures.tokens_per_second:.0f}",
        f"{figures.first_token['p50']:.2f} / {figures.first_token['p99']:.2f}",
        f"{figures.token['p50'] * 1000:.1f} / {figures.token['p99'] * 1000:.1f}",
        f"{figures.target_busy:.0%} / {figures.draft_busy:.0%}",
        f"{figures.draft_length:.1f} / {figures.tokens_per_round:.2f}",
    ]


def to_json(plan: PlanFile, found: Found) -> dict[str, Any]:
    """The plan file with all defaults, and the cheapest fleet of each system, or null."""
    fleets: dict[str, dict[str, Any] | None] = {}
    for system, planned in found.items():
        if planned is None:
            fleets[system.value] = None
            continue
        fleet = planned.fleet
        fleets[system.value] = {
            "targets": fleet.targets,
            "target": asdict(fleet.target),
            "drafts": fleet.drafts,
            "draft": asdict(fleet.draft) if system is not System.PLAIN else None,
            "price": fleet.price,
            "price_per_million_tokens": planned.price_per_million,
            "figures": asdict(planned.figures),
        }
    return {"command": "plan", "plan": plan.dump(), "fleets": fleets}


def advice(found: Found, plan: PlanFile) -> str:
    """The cheaper of the two systems that a cell of Spool can be, and its configuration."""
    enough = [planned for system, planned in found.items() if planned and system is not System.COLOCATED]
    if not enough:
        service = plan.service
        return (
            f"No fleet of up to {plan.max_targets} targets keeps {service.first_token_seconds:g} s to the first token "
            f"and {service.token_seconds * 1000:g} ms a token for {service.percentile:g} % of the requests. Raise "
            "max_targets or the service levels, or look at faster devices."
        )
    planned = min(enough, key=lambda one: one.fleet.price)
    fleet, scheduling = planned.fleet, plan.scheduling
    drafting = fleet.system is System.APART
    lines = [
        f"Enough: {fleet.workers}. In the configuration:",
        "",
        "scheduling:",
        f"  batch_size: {scheduling.batch_size}",
        f"  max_running: {scheduling.max_running_per_target}",
        f"  draft_length: {scheduling.draft_length if drafting else 0}",
        f"  prefill_chunk: {scheduling.prefill_chunk}",
        "groups:",
        "  target:",
        f"    replicas: {fleet.targets}",
    ]
    if drafting:
        lines += ["  draft:", f"    replicas: {fleet.drafts}"]
    return "\n".join(lines)
