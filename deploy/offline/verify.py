"""`spool verify`: speculation against plain decoding by the same engine, one sequence at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
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
class PolicyOutcome:
    """How one policy fared against the reference."""

    policy: Policy
    comparison: Comparison
    statistics: StatisticsSnapshot

    def to_json(self) -> dict[str, Any]:
        return self.comparison.to_json() | {"statistics": self.statistics.to_json()}


@dataclass(frozen=True, slots=True)
class Verification:
    """All outcomes. `generate` compares transformers' own generation with the reference."""

    reference: StatisticsSnapshot
    policies: list[PolicyOutcome]
    generate: Comparison | None

    @property
    def exact(self) -> bool:
        return all(outcome.comparison.exact_match == 1 for outcome in self.policies)

    def to_json(self) -> dict[str, Any]:
        comparisons = [outcome.comparison for outcome in self.policies]
        return {
            "exact_match": min(comparison.exact_match for comparison in comparisons),
            "logits_bit_equal": min(comparison.logits_bit_equal for comparison in comparisons),
            "sequences": comparisons[0].sequences,
            "tokens": self.reference.tokens,
            "policies": {outcome.policy.value: outcome.to_json() for outcome in self.policies},
            "reference": self.reference.to_json(),
            "generate": self.generate.to_json() if self.generate is not None else None,
        }


def verify(settings: VerifySettings) -> int:
    """Exit code 0 if every policy gave exactly the reference's tokens, else 1. Raises `UsageError` and `RunError`."""
    prompts = load_prompts(settings.inputs.prompts, settings.inputs.limit)
    console = error_console()
    with reporting(console) as reporter:
        models = prepare_models(settings.models, settings.drafting, reporter, settings.engine.max_model_len)
        jobs = make_jobs(prompts, models.tokenizer, settings.sampling, models.max_positions)
        verification = run_until_interrupted(_run(settings, models, jobs, reporter))
    _print(verification, console)
    if settings.json_output:
        setting = {"command": "verify", "temperature": settings.sampling.temperature, "exact": settings.models.exact}
        print(json.dumps(setting | verification.to_json()), flush=True)
    return 0 if verification.exact else 1


async def _run(settings: VerifySettings, models: ReadyModels, jobs: Sequence[Job], reporter: Reporter) -> Verification:
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
        expected, reference = await _decode(cell, plain, jobs, reporter)
        for policy, config in zip(policies, configs, strict=True):
            plan = DecodingPlan(policy.value, config, plain.stop_token_ids, settings.drafting, logits_digests=True)
            found, statistics = await _decode(cell, plan, jobs, reporter)
            outcomes.append(PolicyOutcome(policy, compare(jobs, expected, found, models.tokenizer), statistics))
    generate = None
    if settings.reference is not None:
        generated, margins = await generate_with_transformers(settings, models, jobs, reporter)
        generate = compare(jobs, generated, expected, models.tokenizer, margins)
    return Verification(reference, outcomes, generate)


async def _decode(
    cell: Cell, plan: DecodingPlan, jobs: Sequence[Job], reporter: Reporter
) -> tuple[list[Completion], StatisticsSnapshot]:
    completions = [Completion() for _ in jobs]

    def keep(index: int, completion: Completion) -> None:
        completions[index] = completion

    return completions, await decode(cell, plan, jobs, reporter, keep)


def _print(verification: Verification, console: Console) -> None:
    console.print(_table(verification))
    named = [(outcome.policy.value, outcome.comparison) for outcome in verification.policies]
    if verification.generate is not None:
        named.append(("reference, against model.generate,", verification.generate))
    for name, comparison in named:
        if comparison.first_unequal_logits is not None:
            prompt, position = comparison.first_unequal_logits
            console.print(f"{name}: logits first differ at prompt {prompt}, output token {position}", highlight=False)
        if comparison.first_divergence is not None:
            text = f"{name} first differs at {comparison.first_divergence}"
            console.print(text, highlight=False, markup=False, soft_wrap=True)


def _table(verification: Verification) -> Table:
    """One row for each way of decoding."""
    table = Table(title="against plain decoding, one sequence at a time", title_justify="left")
    table.add_column("", style="bold", no_wrap=True)
    for heading in ("same text", "same logits", "tokens/s", "a round", "equal length"):
        table.add_column(heading, justify="right")
    table.add_row("reference", "", "", f"{verification.reference.tokens_per_second:.1f}", "", "")
    for outcome in verification.policies:
        comparison, statistics = outcome.comparison, outcome.statistics
        table.add_row(
            outcome.policy.value,
            f"{comparison.equal_sequences} of {comparison.sequences}",
            f"{comparison.equal_logits} of {comparison.compared_logits}",
            f"{statistics.tokens_per_second:.1f}",
            f"{statistics.committed_per_round:.2f}",
            f"{statistics.equal_length_share:.0%}",
        )
    generate = verification.generate
    if generate is not None:
        table.add_row("model.generate", f"{generate.equal_sequences} of {generate.sequences}", "", "", "", "")
    return table
