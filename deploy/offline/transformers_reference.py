"""Runs `engine.models.reference` in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from deploy.errors import RunError
from deploy.models import ReadyModels
from deploy.offline.decoding import Completion, Job
from deploy.options import RunSettings
from deploy.progress import Reporter
from deploy.workers import worker_devices
from engine.models.reference import ReferenceRequest

_LONGEST_LINE = 1 << 24


async def generate_with_transformers(
    settings: RunSettings, models: ReadyModels, jobs: Sequence[Job], reporter: Reporter
) -> tuple[list[Completion], list[list[float]]]:
    """What `model.generate` answers to each job, and the margins of its tokens. Raises `RunError`."""
    request = ReferenceRequest(
        folder=str(models.target_folder),
        dtype=settings.models.dtype.value,
        device=worker_devices(settings.models.device, [1])[0],
        threads=settings.threads_per_worker(),
        stop_token_ids=sorted(models.tokenizer.stop_token_ids),
        prompts=[job.tokens for job in jobs],
        max_tokens=[job.max_tokens for job in jobs],
    )
    process = await asyncio.create_subprocess_exec(
        # -P: a folder named `engine` where the user happens to be must not come before ours.
        *(sys.executable, "-P", "-m", "engine.models.reference"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_LONGEST_LINE,
    )
    try:
        complaints = asyncio.create_task(_read(process.stderr))
        completions, margins = await _exchange(process, request, len(jobs), reporter)
        if await process.wait() != 0 or len(completions) < len(jobs):
            last = (await complaints).decode(errors="replace").strip().rsplit("\n", 1)[-1]
            raise RunError(f"transformers' generate failed: {last or f'exit code {process.returncode}'}")
        return completions, margins
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _exchange(
    process: asyncio.subprocess.Process, request: ReferenceRequest, total: int, reporter: Reporter
) -> tuple[list[Completion], list[list[float]]]:
    completions: list[Completion] = []
    margins: list[list[float]] = []
    if process.stdin is None or process.stdout is None:
        raise RunError("the reference process has no pipes")
    process.stdin.write(json.dumps(asdict(request)).encode())
    process.stdin.close()
    reporter.run("model.generate", 0, total, None)
    async for line in process.stdout:
        answer = json.loads(line)
        completions.append(Completion(answer["tokens"]))
        margins.append(answer["margins"])
        reporter.run("model.generate", len(completions), total, None)
    return completions, margins


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    return await stream.read() if stream is not None else b""
