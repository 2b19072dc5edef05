"""Lines of results: written in the order of the prompts, and kept by a run that goes on where another stopped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.errors import RunError, UsageError
from spool.deploy.offline.decoding import Completion, Job
from spool.deploy.offline.settings import SamplingSettings
from spool.services.text.tokenizer import ModelTokenizer

Write = Callable[[dict[str, Any]], None]


def settings_digest(config: SpoolConfig, sampling: SamplingSettings, vocabulary_digest: bytes) -> str:
    """Equal for settings that give equal text: model, numbers and sampling, but not how the work is organised."""
    models = config.models
    numbers = [models.dtype, models.kv_cache_dtype, models.quantization, models.exact]
    content = [
        [models.target, vocabulary_digest.hex(), *numbers, config.engine.max_model_len],
        *([] if models.chat_template is None else [models.template_text()]),
        sampling.model_dump(mode="json"),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def result_line(job: Job, completion: Completion, tokenizer: ModelTokenizer, digest: str) -> dict[str, Any]:
    """The content of one line of output; `digest` is that of the settings."""
    identity = {} if job.prompt.identity is None else {"id": job.prompt.identity}
    return {
        "index": job.prompt.index,
        **identity,
        "text": tokenizer.decode(completion.tokens),
        "finish_reason": completion.finish_reason.value if completion.finish_reason else None,
        "tokens": completion.tokens,
        "prompt_tokens": len(job.tokens),
        "seed": job.sampling.seed,
        "input_digest": job.prompt.digest,
        "settings_digest": digest,
    }


class InOrder:
    """Passes lines on in the order of their numbers, whatever the order they come in."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._early: dict[int, dict[str, Any]] = {}
        self._next = 0

    def add(self, number: int, line: dict[str, Any]) -> None:
        self._early[number] = line
        while self._next in self._early:
            self._write(self._early.pop(self._next))
            self._next += 1


def keep_finished(path: Path, jobs: Sequence[Job], digest: str) -> int:
    """How many of the jobs, from the first on, the file already answers; a line cut short at the end is dropped.

    Raises `UsageError` where the file holds anything else than answers to these jobs with these settings.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UsageError(f"--output is {path}, must be a regular file: an interrupted run goes on from it")
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    whole = content[: content.rfind(b"\n") + 1]
    lines = whole.splitlines()
    for number, line in enumerate(lines, 1):
        place = f"{path}:{number}"
        try:
            found = json.loads(line)
            index, inputs, settings = found["index"], found["input_digest"], found["settings_digest"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{place} is no line of results; choose another --output") from error
        if number > len(jobs):
            raise UsageError(f"{place} answers a prompt that is not among the {len(jobs)} given")
        prompt = jobs[number - 1].prompt
        if (index, inputs) != (prompt.index, prompt.digest):
            raise UsageError(f"{place} answers another prompt; choose another --output")
        if settings != digest:
            raise UsageError(f"{place} was written with other settings; choose another --output")
    try:
        with path.open("ab") as file:
            file.truncate(len(whole))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return len(lines)


def append(path: Path, line: dict[str, Any]) -> None:
    """The line is on disk when this returns. Raises `RunError`."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror} (free some space; the same command goes on where this one stopped)"
        ) from error
