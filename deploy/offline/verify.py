"""`spool verify`: speculation against plain decoding by the same engine, one sequence at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from deploy.config.spool_config import SpoolConfig
from deploy.errors import UsageError
from deploy.event_loop import run_until_interrupted
from deploy.models import ReadyModels, prepare_models
from deploy.offline.cell import Cell, running_cell
from deploy.offline.comparison import Comparison, compare
from deploy.offline.decoding import Completion, DecodingPlan, Job, decode, longest_lengths, make_jobs
from deploy.offline.prompts import load_prompts
from deploy.offline.settings import InputSettings, SamplingSettings
from deploy.offline.transformers_reference import generate_with_transformers
from deploy.progress import Reporter, describe, say
from scheduler.config import Policy, SchedulerConfig
from services.scheduler.telemetry.statistics import StatisticsSnapshot


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way of decoding against plain decoding. transformers has no statistics."""

    name: str
    comparison: Comparison
    statistics: StatisticsSnapshot | None

    def to_json(self) -> dict[str, Any]:
        return self.comparison.to_json() | {"statistics": self.statistics.to_json() if self.statistics else None}


def verify(
    config: SpoolConfig,
    sampling: SamplingSettings,
    inputs: InputSettings,
    policies: Sequence[Policy],
    reference: str | None,
) -> int:
    """Exit code 0 if every policy gave exactly the reference's tokens, else 1. Raises `UsageError` and `RunError`."""
    if reference is not None:
        _check_reference(config, sampling)
    prompts = load_prompts(inputs.prompts, inputs.limit)
    reporter = Reporter()
    models = prepare_models(config, reporter)
    jobs = make_jobs(prompts, models.tokenizer, sampling, models.max_positions)
    expected, plain, found = run_until_interrupted(_run(config, policies, models, jobs, reporter))
    outcomes = list(found)
    generate: Comparison | None = None
    if reference is not None:
        generated, margins = generate_with_transformers(config, models, jobs, reporter)
        generate = compare(jobs, generated, expected, models.tokenizer, margins)
        outcomes.append(Outcome("model.generate", generate, None))
    for outcome in outcomes:
        _print(outcome)
    exact_match = min(outcome.comparison.exact_match for outcome in found)
    if inputs.json_output:
        summary = {
            "command": "verify",
            "temperature": sampling.temperature,
            "exact": config.models.exact,
            "exact_match": exact_match,
            "logits_bit_equal": min(outcome.comparison.logits_bit_equal for outcome in found),
            "sequences": len(jobs),
            "tokens": plain.tokens,
            "policies": {outcome.name: outcome.to_json() for outcome in found},
            "reference": plain.to_json(),
            "generate": generate.to_json() if generate is not None else None,
        }
        print(json.dumps(summary), flush=True)
    return 0 if exact_match == 1 else 1


def _check_reference(config: SpoolConfig, sampling: SamplingSettings) -> None:
    """Raises `UsageError` for what `model.generate` does in another way."""
    models = config.models
    for name, value, wanted, reason in (
        ("temperature", sampling.temperature, (0,), "draws other random numbers"),
        ("quantization", models.quantization, ("auto", "none"), "does not round weights"),
        ("kv_cache_dtype", models.kv_cache_dtype, ("auto",), "does not round KV"),
    ):
        if value not in wanted:
            limit = " or ".join(map(str, wanted))
            raise UsageError(f"{name} is {value}, must be {limit} with --reference generate: transformers {reason}")


async def _run(
    config: SpoolConfig, policies: Sequence[Policy], models: ReadyModels, jobs: Sequence[Job], reporter: Reporter
) -> tuple[list[Completion], StatisticsSnapshot, list[Outcome]]:
    """What plain decoding gave, its statistics, and the outcome of each policy."""
    plain = DecodingPlan(
        title="reference",
        config=SchedulerConfig(batch_size=1, max_running=1, policy=Policy.RAGGED, draft_length=0),
        stop_token_ids=models.tokenizer.stop_token_ids,
        drafting=False,
        logits_digests=True,
    )
    drafts = config.models.drafts
    configs = {policy: config.scheduling.scheduler_config(drafts, policy=policy) for policy in policies}
    outcomes = []
    async with running_cell(config, longest_lengths(jobs, configs[policies[0]]), reporter) as cell:
        expected, plain_statistics = await _decode(cell, plain, jobs, reporter)
        for policy, scheduling in configs.items():
            plan = replace(plain, title=policy.value, config=scheduling, drafting=drafts)
            found, statistics = await _decode(cell, plan, jobs, reporter)
            outcomes.append(Outcome(policy.value, compare(jobs, expected, found, models.tokenizer), statistics))
    return expected, plain_statistics, outcomes


async def _decode(
    cell: Cell, plan: DecodingPlan, jobs: Sequence[Job], reporter: Reporter
) -> tuple[list[Completion], StatisticsSnapshot]:
    completions = [Completion() for _ in jobs]
    statistics = await decode(cell, plan, jobs, reporter, completions.__setitem__)
    return completions, statistics


def _print(outcome: Outcome) -> None:
    name, comparison = outcome.name, outcome.comparison
    lines = [f"{name}: {comparison.equal_sequences} of {comparison.sequences} texts are those of plain decoding"]
    if outcome.statistics is not None:
        lines[0] += (
            f", {comparison.equal_logits} of {comparison.compared_logits} logits, {describe(outcome.statistics)}"
        )
    if comparison.first_unequal_logits is not None:
        prompt, position = comparison.first_unequal_logits
        lines.append(f"{name}: logits first differ at prompt {prompt}, output token {position}")
    if comparison.first_divergence is not None:
        lines.append(f"{name} first differs at {comparison.first_divergence}")
    say("\n".join(lines))
