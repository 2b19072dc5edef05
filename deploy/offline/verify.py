"""`spool verify`: speculation against plain decoding by the same engine, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.event_loop import run_until_interrupted
from spool.deploy.models import ReadyModels, prepare_models
from spool.deploy.offline.cell import Cell, running_cell
from spool.deploy.offline.comparison import Comparison, compare
from spool.deploy.offline.decoding import Completion, DecodingPlan, Job, decode, longest_lengths, make_jobs
from spool.deploy.offline.prompts import load_prompts
from spool.deploy.offline.settings import InputSettings, SamplingSettings
from spool.deploy.progress import Reporter, describe, report
from spool.scheduler.config import Policy, SchedulerConfig
from spool.services.scheduler.telemetry.statistics import StatisticsSnapshot


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy against plain decoding."""

    name: str
    comparison: Comparison
    statistics: StatisticsSnapshot

    def to_json(self) -> dict[str, Any]:
        return self.comparison.to_json() | {"statistics": self.statistics.to_json()}


def verify(config: SpoolConfig, sampling: SamplingSettings, inputs: InputSettings, policies: Sequence[Policy]) -> int:
    """Exit code 0 if every policy gave exactly the reference's tokens and logits, and one drafted; else 1.

    Raises `UsageError` and `RunError`.
    """
    prompts = load_prompts(inputs.prompts, inputs.limit)
    reporter = Reporter()
    models = prepare_models(config, reporter)
    jobs = make_jobs(prompts, models.tokenizer, sampling, models.max_positions)
    plain, outcomes = run_until_interrupted(_run(config, policies, models, jobs, reporter))
    exact_match = min(outcome.comparison.exact_match for outcome in outcomes)
    logits_bit_equal = min(outcome.comparison.logits_bit_equal for outcome in outcomes)
    exact = exact_match == logits_bit_equal == 1
    drafted = any(outcome.statistics.drafted for outcome in outcomes)
    lines = [line for outcome in outcomes for line in _lines(outcome)]
    verdict = "no" if not exact else "yes" if drafted else "not shown, nothing was drafted"
    summary = {
        "command": "verify",
        "temperature": sampling.temperature,
        "exact": config.models.exact,
        "exact_match": exact_match,
        "logits_bit_equal": logits_bit_equal,
        "sequences": len(jobs),
        "tokens": plain.tokens,
        "policies": {outcome.name: outcome.to_json() for outcome in outcomes},
        "reference": plain.to_json(),
    }
    report([*lines, f"exact: {verdict}"], summary if inputs.json_output else None)
    return 0 if exact and drafted else 1


async def _run(
    config: SpoolConfig, policies: Sequence[Policy], models: ReadyModels, jobs: Sequence[Job], reporter: Reporter
) -> tuple[StatisticsSnapshot, list[Outcome]]:
    """The statistics of plain decoding, and the outcome of each policy."""
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
    return plain_statistics, outcomes


async def _decode(
    cell: Cell, plan: DecodingPlan, jobs: Sequence[Job], reporter: Reporter
) -> tuple[list[Completion], StatisticsSnapshot]:
    completions = [Completion() for _ in jobs]
    statistics = await decode(cell, plan, jobs, reporter, completions.__setitem__)
    return completions, statistics


def _lines(outcome: Outcome) -> list[str]:
    name, comparison = outcome.name, outcome.comparison
    texts = f"{comparison.equal_sequences} of {comparison.sequences} texts are those of plain decoding"
    logits = f"{comparison.equal_logits} of {comparison.compared_logits} logits"
    lines = [f"{name}: {texts}, {logits}, {describe(outcome.statistics)}"]
    if comparison.first_unequal_logits is not None:
        prompt, position = comparison.first_unequal_logits
        lines.append(f"{name}: logits first differ at prompt {prompt}, output token {position}")
    if comparison.first_divergence is not None:
        lines.append(f"{name} first differs at {comparison.first_divergence}")
    if not outcome.statistics.drafted:
        lines.append(f"{name}: nothing was drafted: this proves nothing")
    return lines
