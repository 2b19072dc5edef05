"""`spool bench profile`: the costs of a pair of models where it runs, for `spool plan`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import yaml

from bench.profiling.loads import ANSWER, SHORT_PROMPT
from bench.profiling.measured_cell import MeasuredCell
from bench.profiling.measuring import measure_pair
from bench.profiling.pair import check_pair, pair_launches
from bench.profiling.profile import Profile, WorkerProfile
from bench.profiling.text_prompts import TextPrompts
from deploy.config.spool_config import SpoolConfig
from deploy.errors import RunError, UsageError
from deploy.event_loop import run_until_interrupted
from deploy.models import ReadyModels, prepare_models
from deploy.offline.cell import launched_cell
from deploy.offline.prompts import load_prompts
from deploy.progress import Reporter, error_console, reporting
from services.backend.interface import BackendUnavailableError
from services.backend.sequence_stream import AdmissionRefusedError, SequenceFailedError
from services.launch.launcher import WorkerLaunch
from services.launch.process_tuning import keep_loaded_objects

_LEAST_PROMPT = 2 * SHORT_PROMPT


def bench_profile(config: SpoolConfig, prompts: Path | None, prompt_tokens: int, json_output: bool) -> int:
    """Exit code 0. Raises `UsageError` and `RunError`."""
    check_pair(config)
    if prompt_tokens < _LEAST_PROMPT:
        raise UsageError(f"--prompt-tokens is {prompt_tokens}, must be at least {_LEAST_PROMPT}")
    texts = load_prompts(prompts, None)
    console = error_console()
    with reporting(console) as reporter:
        models = prepare_models(config.models, True, reporter, config.engine.max_model_len)
        check_length(config, models, prompt_tokens)
        source = TextPrompts([text.encode(models.tokenizer) for text in texts])
        launches = pair_launches(config)
        profile = run_until_interrupted(_profile(config, launches, source, prompt_tokens, reporter))
        console.print(described(profile), highlight=False, markup=False, soft_wrap=True)
    found = profile.plan(config.scheduler_config())
    if json_output:
        print(json.dumps({"command": "bench profile", "plan": found, "profile": asdict(profile)}), flush=True)
    else:
        print(yaml.safe_dump(found, sort_keys=False), end="", flush=True)
    return 0


def check_length(config: SpoolConfig, models: ReadyModels, prompt_tokens: int) -> None:
    """Raises `UsageError` where an answer to so long a prompt is more than the model takes."""
    most = models.max_positions - ANSWER - config.scheduling.draft_length
    if prompt_tokens > most:
        raise UsageError(
            f"--prompt-tokens is {prompt_tokens}, must be at most {most}: the model takes {models.max_positions} with "
            "the answer"
        )


async def _profile(
    config: SpoolConfig, launches: Sequence[WorkerLaunch], prompts: TextPrompts, prompt_tokens: int, reporter: Reporter
) -> Profile:
    async with launched_cell(launches, reporter) as cell:
        keep_loaded_objects()

        def say(what: str, share: float) -> None:
            reporter.stage("profile", what, share)

        try:
            return await measure_pair(MeasuredCell(cell), config.scheduler_config(), prompts, prompt_tokens, say)
        except (AdmissionRefusedError, SequenceFailedError, BackendUnavailableError) as error:
            raise RunError(str(error)) from error


def described(profile: Profile) -> str:
    """How sure the figures are, for a person."""
    target, draft = _described("target", profile.target), _described("draft", profile.draft)
    return f"{target}; {draft}; acceptance of {profile.tried} draft tokens"


def _described(role: str, worker: WorkerProfile) -> str:
    return f"{role}: {worker.law.steps} steps, predicted to within {worker.law.error:.1%} (median)"
