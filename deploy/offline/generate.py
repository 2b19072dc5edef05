"""`spool generate`: answers prompts and writes the answers down."""

from __future__ import annotations

import json
import sys
from functools import partial
from textwrap import indent
from typing import Any

from rich.table import Table
from rich.text import Text

from deploy.event_loop import run_until_interrupted
from deploy.models import ReadyModels, prepare_models
from deploy.offline.cell import running_cell
from deploy.offline.decoding import Completion, DecodingPlan, Job, decode, longest_lengths, make_jobs
from deploy.offline.prompts import load_prompts
from deploy.offline.results import InOrder, Write, append, keep_finished, result_line, settings_digest
from deploy.options import GenerateSettings
from deploy.progress import Reporter, error_console, two_columns
from services.scheduler.telemetry.statistics import StatisticsSnapshot


def generate(settings: GenerateSettings) -> int:
    """Exit code 0. Raises `UsageError` and `RunError`."""
    prompts = load_prompts(settings.inputs.prompts, settings.inputs.limit)
    console = error_console()
    reporter = Reporter(console)
    models = prepare_models(settings.models, settings.drafting, reporter, settings.engine.max_model_len)
    jobs = make_jobs(prompts, models.tokenizer, settings.sampling, models.max_positions)
    digest = settings_digest(settings, models.tokenizer.vocabulary_digest)
    finished = keep_finished(settings.output, jobs, digest) if settings.output is not None else 0
    statistics = _run(settings, models, jobs[finished:], digest, reporter)
    if finished:
        console.print(f"{finished} of {len(jobs)} answers were there already", highlight=False)
    if statistics.tokens:
        console.print(statistics_table(statistics))
    if settings.output is not None:
        console.print(f"answers are in {settings.output}", highlight=False, markup=False)
    if settings.json_output:
        summary = {"command": "generate", "sequences": len(jobs), "kept": finished} | statistics.to_json()
        print(json.dumps(summary), flush=True)
    return 0


def _run(
    settings: GenerateSettings, models: ReadyModels, jobs: list[Job], digest: str, reporter: Reporter
) -> StatisticsSnapshot:
    if not jobs:
        return StatisticsSnapshot()
    plan = DecodingPlan(
        title="generating",
        config=settings.scheduling.config(settings.policy, settings.drafting),
        stop_token_ids=models.tokenizer.stop_token_ids,
        drafting=settings.drafting,
    )
    lines = InOrder(_writer(settings, jobs, reporter))

    def on_done(index: int, completion: Completion) -> None:
        lines.add(index, result_line(jobs[index], completion, models.tokenizer, digest))

    async def run() -> StatisticsSnapshot:
        async with running_cell(settings, longest_lengths(jobs, plan.config), reporter) as cell:
            return await decode(cell, plan, jobs, reporter, on_done)

    return run_until_interrupted(run())


def _writer(settings: GenerateSettings, jobs: list[Job], reporter: Reporter) -> Write:
    """To the file; else readable text for the built-in prompts and on a terminal, JSON lines elsewhere."""
    if settings.output is not None:
        return partial(append, settings.output)
    if settings.inputs.prompts is not None and not sys.stdout.isatty():
        return lambda line: print(json.dumps(line, ensure_ascii=False), flush=True)
    shown = {job.prompt.index: job.prompt.shown for job in jobs}

    def show(line: dict[str, Any]) -> None:
        reporter.show(Text(shown[line["index"]], style="bold"))
        reporter.show(Text(indent(line["text"], "  ") + "\n"))

    return show


def statistics_table(statistics: StatisticsSnapshot) -> Table:
    """Where tokens and time went."""
    rows = {
        "tokens": f"{statistics.tokens} in {statistics.seconds:.1f} s",
        "throughput": f"{statistics.tokens_per_second:.1f} tokens/s",
    }
    if statistics.drafted:
        rows["committed per round"] = f"{statistics.committed_per_round:.2f} tokens"
        rows["accepted"] = f"{statistics.acceptance_rate:.1%} of {statistics.drafted} drafted tokens"
        rows["accepted lengths"] = _histogram(statistics.accepted_lengths)
    rows |= {
        "verify batches": f"{statistics.groups}, {statistics.mean_group_size:.1f} rows on average",
        "rows in a batch": _histogram(statistics.group_sizes),
        "of equal length": f"{statistics.equal_length_share:.1%} of those with two rows or more",
        "target time at work": f"{statistics.target_busy_share:.1%}",
        "lost to waiting": f"{statistics.waiting_share:.1%}",
        "lost to realignment": f"{statistics.realignment_share:.1%}",
        "lost to scheduling": f"{statistics.scheduling_share:.1%}",
    }
    return two_columns("run", rows.items())


def _histogram(counts: dict[int, int]) -> str:
    """The share of each number: `0: 52%, 1: 31%`; small ones at the end are left out."""
    total = sum(counts.values())
    return ", ".join(f"{number}: {count / total:.0%}" for number, count in counts.items() if count / total >= 0.005)
