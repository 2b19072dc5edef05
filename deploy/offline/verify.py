"""`spool verify`: speculation against plain decoding by the same engine, one sequence at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.event_loop import run_until_interrupted
from deploy.models import ReadyModels, prepare_models
from deploy.offline.cell import Cell, running_cell
from deploy.offline.comparison import Comparison, compare
from deploy.offline.decoding import Completion, DecodingPlan, Job, decode, longest_lengths, make_jobs
from deploy.offline.prompts import load_prompts
from deploy.offline.transformers_reference import generate_with_transformers
from deploy.options import VerifySettings
from deploy.progress import Reporter, error_console, reporting
from scheduler.config import Policy, SchedulerConfig
from services.scheduler.telemetry.statistics import StatisticsSnapshot


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way of decoding against the reference, which has no comparison. transformers has no statistics."""

    name: str
    comparison: Comparison | None
    statistics: StatisticsSnapshot | None


def verify(settings: VerifySettings) -> int:
    """Exit code 0 if every policy gave exactly the reference's tokens, else 1. Raises `UsageError` and `RunError`."""
    prompts = load_prompts(settings.inputs.prompts, settings.inputs.limit)
    console = error_console()
    with reporting(console) as reporter:
        models = prepare_models(settings.models, settings.drafting, reporter, settings.engine.max_model_len)
        jobs = make_jobs(prompts, models.tokenizer, settings.sampling, models.max_positions)
        reference, policies, generate = run_until_interrupted(_run(settings, models, jobs, reporter))
    outcomes = [reference, *policies, *([generate] if generate is not None else [])]
    console.print(_table(outcomes))
    for outcome in outcomes:
        _print_differences(outcome, console)
    comparisons = [outcome.comparison for outcome in policies if outcome.comparison is not None]
    exact_match = min(comparison.exact_match for comparison in comparisons)
    if settings.json_output:
        summary = {
            "command": "verify",
            "temperature": settings.sampling.temperature,
            "exact": settings.models.exact,
            "exact_match": exact_match,
            "logits_bit_equal": min(comparison.logits_bit_equal for comparison in comparisons),
            "sequences": len(jobs),
            "tokens": reference.statistics.tokens if reference.statistics is not None else 0,
            "policies": {outcome.name: _plain(outcome) for outcome in policies},
            "reference": _plain(reference)["statistics"],
            "generate": generate.comparison.to_json() if generate is not None and generate.comparison else None,
        }
        print(json.dumps(summary), flush=True)
    return 0 if exact_match == 1 else 1


def _plain(outcome: Outcome) -> dict[str, Any]:
    found = outcome.comparison.to_json() if outcome.comparison is not None else {}
    return found | {"statistics": outcome.statistics.to_json() if outcome.statistics is not None else None}


async def _run(
    settings: VerifySettings, models: ReadyModels, jobs: Sequence[Job], reporter: Reporter
) -> tuple[Outcome, list[Outcome], Outcome | None]:
    """The reference, each policy, and transformers' own generation where that was asked for."""
    plain = DecodingPlan(
        title="reference",
        config=SchedulerConfig(batch_size=1, max_running=1, policy=Policy.RAGGED, draft_length=0),
        stop_token_ids=models.tokenizer.stop_token_ids,
        drafting=False,
        logits_digests=True,
    )
    policies = list(dict.fromkeys(settings.policy))
    configs = [settings.scheduling.config(policy, settings.drafting) for policy in policies]
    outcomes = []
    async with running_cell(settings, longest_lengths(jobs, configs[0]), reporter) as cell:
        expected, statistics = await _decode(cell, plain, jobs, reporter)
        reference = Outcome("reference", None, statistics)
        for policy, config in zip(policies, configs, strict=True):
            plan = replace(plain, title=policy.value, config=config, drafting=settings.drafting)
            found, statistics = await _decode(cell, plan, jobs, reporter)
            outcomes.append(Outcome(policy.value, compare(jobs, expected, found, models.tokenizer), statistics))
    if settings.reference is None:
        return reference, outcomes, None
    generated, margins = await generate_with_transformers(settings, models, jobs, reporter)
    generate = compare(jobs, generated, expected, models.tokenizer, margins)
    return reference, outcomes, Outcome("model.generate", generate, None)


async def _decode(
    cell: Cell, plan: DecodingPlan, jobs: Sequence[Job], reporter: Reporter
) -> tuple[list[Completion], StatisticsSnapshot]:
    completions = [Completion() for _ in jobs]
    statistics = await decode(cell, plan, jobs, reporter, completions.__setitem__)
    return completions, statistics


def _print_differences(outcome: Outcome, console: Console) -> None:
    comparison = outcome.comparison
    if comparison is None:
        return
    if comparison.first_unequal_logits is not None:
        prompt, position = comparison.first_unequal_logits
        text = f"{outcome.name}: logits first differ at prompt {prompt}, output token {position}"
        console.print(text, highlight=False)
    if comparison.first_divergence is not None:
        text = f"{outcome.name} first differs at {comparison.first_divergence}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _table(outcomes: Sequence[Outcome]) -> Table:
    """One row for each way of decoding."""
    table = Table(title="against plain decoding, one sequence at a time", title_justify="left")
    table.add_column("", style="bold", no_wrap=True)
    for heading in ("same text", "same logits", "tokens/s", "a round", "equal length"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        comparison, statistics = outcome.comparison, outcome.statistics
        cells = ["", ""]
        if comparison is not None:
            logits = f"{comparison.equal_logits} of {comparison.compared_logits}" if statistics is not None else ""
            cells = [f"{comparison.equal_sequences} of {comparison.sequences}", logits]
        if statistics is not None:
            cells.append(f"{statistics.tokens_per_second:.1f}")
        if statistics is not None and comparison is not None:
            cells += [f"{statistics.committed_per_round:.2f}", f"{statistics.equal_length_share:.0%}"]
        table.add_row(outcome.name, *cells)
    return table
