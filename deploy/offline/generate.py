"""`spool generate`: answers prompts and writes the answers down."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import indent

from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.event_loop import run_until_interrupted
from spool.deploy.models import ReadyModels, prepare_models
from spool.deploy.offline.cell import running_cell
from spool.deploy.offline.decoding import Completion, DecodingPlan, Job, decode, longest_lengths, make_jobs
from spool.deploy.offline.prompts import load_prompts
from spool.deploy.offline.results import InOrder, Write, append, keep_finished, result_line, settings_digest
from spool.deploy.offline.settings import InputSettings, SamplingSettings
from spool.deploy.progress import Reporter, say
from spool.services.scheduler.telemetry.statistics import StatisticsSnapshot


def generate(config: SpoolConfig, sampling: SamplingSettings, inputs: InputSettings, output: Path | None) -> int:
    """To the file `output`, or to standard output. Exit code 0. Raises `UsageError` and `RunError`."""
    prompts = load_prompts(inputs.prompts, inputs.limit)
    reporter = Reporter()
    models = prepare_models(config, reporter)
    jobs = make_jobs(prompts, models.tokenizer, sampling, models.max_positions)
    digest = settings_digest(config, sampling, models.tokenizer.vocabulary_digest)
    finished = keep_finished(output, jobs, digest) if output is not None else 0
    left = jobs[finished:]
    lines = InOrder(_writer(inputs, output, left))
    statistics = StatisticsSnapshot()
    if left:

        def on_done(index: int, completion: Completion) -> None:
            lines.add(index, result_line(left[index], completion, models.tokenizer, digest))

        statistics = run_until_interrupted(_run(config, models, left, reporter, on_done))
    if finished:
        say(f"{finished} of {len(jobs)} answers were there already")
    if output is not None:
        say(f"answers are in {output}")
    if inputs.json_output:
        summary = {"command": "generate", "sequences": len(jobs), "kept": finished} | statistics.to_json()
        print(json.dumps(summary), flush=True)
    return 0


async def _run(
    config: SpoolConfig,
    models: ReadyModels,
    jobs: list[Job],
    reporter: Reporter,
    on_done: Callable[[int, Completion], None],
) -> StatisticsSnapshot:
    drafts = config.models.drafts
    scheduling = config.scheduling.scheduler_config(drafts)
    plan = DecodingPlan("generating", scheduling, models.tokenizer.stop_token_ids, drafts)
    async with running_cell(config, longest_lengths(jobs, scheduling), reporter) as cell:
        return await decode(cell, plan, jobs, reporter, on_done)


def _writer(inputs: InputSettings, output: Path | None, jobs: list[Job]) -> Write:
    """To the file; else readable text for the built-in prompts and on a terminal, JSON lines elsewhere."""
    if output is not None:
        return partial(append, output)
    if inputs.prompts is not None and not sys.stdout.isatty():
        return lambda line: print(json.dumps(line), flush=True)
    shown = {job.prompt.index: job.prompt.shown for job in jobs}
    return lambda line: print(f"{shown[line['index']]}\n{indent(line['text'], '  ')}\n", flush=True)
