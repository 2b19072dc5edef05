"""What `spool plan` prints, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from deploy.planning.fleets import Planned, System
from deploy.planning.plan_file import PlanFile

_COLUMNS = (
    "",
    "targets",
    "drafts",
    "price an hour",
    "price of 1 M tokens",
    "tokens/s",
    "first token p50 / p99, s",
    "token p50 / p99, ms",
    "busy targets / drafts",
    "draft length",
    "tokens a round",
)


def table(found: Mapping[System, Planned | None]) -> Table:
    """A row for each system; a dash for one that cannot keep the service level."""
    shown = Table(*_COLUMNS)
    for system, planned in found.items():
        if planned is None:
            shown.add_row(system.value, *["-"] * (len(_COLUMNS) - 1))
            continue
        fleet, figures = planned.fleet, planned.figures
        drafting = system is not System.PLAIN
        drafts = "on the targets" if system is System.COLOCATED else f"{fleet.drafts} x {fleet.draft.name}"
        shown.add_row(
            system.value,
            f"{fleet.targets} x {fleet.target.name}",
            drafts if drafting else "none",
            f"{fleet.price:.2f}",
            f"{planned.price_per_million:.2f}",
            f"{figures.tokens_per_second:.0f}",
            f"{figures.first_token['p50']:.2f} / {figures.first_token['p99']:.2f}",
            f"{figures.token['p50'] * 1000:.1f} / {figures.token['p99'] * 1000:.1f}",
            f"{figures.target_busy:.0%} / {figures.draft_busy:.0%}" if drafting else f"{figures.target_busy:.0%}",
            f"{figures.draft_length:.1f}" if drafting else "0",
            f"{figures.tokens_per_round:.2f}",
        )
    return shown


def to_json(plan: PlanFile, found: Mapping[System, Planned | None]) -> dict[str, Any]:
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


def advice(found: Mapping[System, Planned | None], plan: PlanFile) -> str:
    """The cheapest of all, in a sentence; what to put into the configuration, where that is Spool's to run."""
    enough = [(system, planned) for system, planned in found.items() if planned is not None]
    if not enough:
        return (
            f"No fleet of up to {plan.max_targets} targets keeps {plan.service.first_token_seconds:g} s to the first "
            f"token and {plan.service.token_seconds * 1000:g} ms a token for {plan.service.percentile:g} % of the "
            "requests: raise max_targets or the service level, or look at faster devices."
        )
    system, planned = min(enough, key=lambda one: one[1].fleet.price)
    fleet, scheduling = planned.fleet, plan.scheduling
    sentence = f"The cheapest is {system.value}: {fleet.targets} targets on {fleet.target.name}"
    if system is System.APART:
        sentence += f" and {fleet.drafts} drafts on {fleet.draft.name}"
    if system is System.COLOCATED:
        return f"{sentence}, each with its draft. Spool runs drafts on devices of their own."
    drafting = system is System.APART
    lines = [
        f"{sentence}. In the configuration:",
        "",
        "scheduling:",
        f"  batch_size: {scheduling.batch_size}",
        f"  max_running: {scheduling.max_running_per_target * fleet.targets}",
        f"  draft_length: {scheduling.draft_length if drafting else 0}",
        f"  prefill_chunk: {scheduling.prefill_chunk}",
        "groups:",
        "  target:",
        f"    replicas: {fleet.targets}",
    ]
    if drafting:
        lines += ["  draft:", f"    replicas: {fleet.drafts}"]
    return "\n".join(lines)
