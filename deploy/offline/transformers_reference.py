"""Runs `engine.models.reference` in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict

from deploy.config.spool_config import SpoolConfig
from deploy.errors import RunError
from deploy.models import ReadyModels
from deploy.offline.decoding import Completion, Job
from deploy.progress import Reporter
from deploy.workers import worker_devices
from engine.models.reference import ReferenceRequest
from scheduler.messages import Role


def generate_with_transformers(
    config: SpoolConfig, models: ReadyModels, jobs: Sequence[Job], reporter: Reporter
) -> tuple[list[Completion], list[list[float]]]:
    """What `model.generate` answers to each job, and the margins of its tokens. Raises `RunError`."""
    request = ReferenceRequest(
        folder=str(models.target_folder),
        dtype=config.models.dtype,
        device=worker_devices(config.models.device, [1])[0],
        threads=config.threads(Role.TARGET),
        stop_token_ids=sorted(models.tokenizer.stop_token_ids),
        prompts=[job.tokens for job in jobs],
        max_tokens=[job.max_tokens for job in jobs],
    )
    completions: list[Completion] = []
    margins: list[list[float]] = []
    # -P: a folder named `engine` in the current directory must not shadow Spool's.
    command = [sys.executable, "-P", "-m", "engine.models.reference"]
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+", errors="replace") as log:
        json.dump(asdict(request), given)
        given.seek(0)
        with subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            try:
                reporter.run("model.generate", 0, len(jobs), None)
                for line in process.stdout or ():
                    answer = json.loads(line)
                    completions.append(Completion(answer["tokens"]))
                    margins.append(answer["margins"])
                    reporter.run("model.generate", len(completions), len(jobs), None)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0 or len(completions) < len(jobs):
            log.seek(0)
            last = log.read().strip().rpartition("\n")[2]
            raise RunError(f"transformers' generate failed: {last or f'exit code {process.returncode}'}")
    return completions, margins
