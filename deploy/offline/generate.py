"""`spool generate`: answers prompts and writes the answers down."""

from __future__ import annotations

import json
import sys
from functools import partial
from textwrap import indent

from deploy.event_loop import run_until_interrupted
from deploy.models import ReadyModels, prepare_models
from deploy.offline.cell import running_cell
from deploy.offline.decoding import Completion, DecodingPlan, Job, decode, longest_lengths, make_jobs
from deploy.offline.prompts import load_prompts
from deploy.offline.results import InOrder, Write, append, keep_finished, result_line, settings_digest
from deploy.options import GenerateSettings
from deploy.progress import Reporter, say
from services.scheduler.telemetry.statistics import StatisticsSnapshot


def generate(settings: GenerateSettings) -> int:
    """Exit code 0. Raises `UsageError` and `RunError`."""
    prompts = load_prompts(settings.inputs.prompts, settings.inputs.limit)
    with Reporter() as reporter:
        models = prepare_models(settings.models, settings.drafting, reporter, settings.engine.max_model_len)
        jobs = make_jobs(prompts, models.tokenizer, settings.sampling, models.max_positions)
        digest = settings_digest(settings, models.tokenizer.vocabulary_digest)
        finished = keep_finished(settings.output, jobs, digest) if settings.output is not None else 0
        statistics = _run(settings, models, jobs[finished:], digest, reporter)
    if finished:
        say(f"{finished} of {len(jobs)} answers were there already")
    if settings.output is not None:
        say(f"answers are in {settings.output}")
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
    lines = InOrder(_writer(settings, jobs))

    def on_done(index: int, completion: Completion) -> None:
        lines.add(index, result_line(jobs[index], completion, models.tokenizer, digest))

    async def run() -> StatisticsSnapshot:
        async with running_cell(settings, longest_lengths(jobs, plan.config), reporter) as cell:
            return await decode(cell, plan, jobs, reporter, on_done)

    return run_until_interrupted(run())


def _writer(settings: GenerateSettings, jobs: list[Job]) -> Write:
    """To the file; else readable text for the built-in prompts and on a terminal, JSON lines elsewhere."""
    if settings.output is not None:
        return partial(append, settings.output)
    if settings.inputs.prompts is not None and not sys.stdout.isatty():
        return lambda line: print(json.dumps(line, ensure_ascii=False), flush=True)
    shown = {job.prompt.index: job.prompt.shown for job in jobs}
    return lambda line: print(f"{shown[line['index']]}\n{indent(line['text'], '  ')}\n", flush=True)
