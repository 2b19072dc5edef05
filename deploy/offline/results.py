"""Lines of results: written in the order of the prompts, checked and kept when a run goes on where one stopped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deploy.errors import UsageError
from deploy.offline.decoding import Completion, Job
from deploy.options import RunSettings
from services.text.tokenizer import ModelTokenizer


def settings_digest(settings: RunSettings, vocabulary_digest: bytes) -> str:
    """Equal for settings that give equal text: model, numbers and sampling, but not how the work is organised."""
    models = settings.models
    content: list[Any] = [
        [models.target, vocabulary_digest.hex(), models.dtype.value, models.exact],
        settings.sampling.model_dump(mode="json"),
    ]
    if settings.engine.max_model_len is not None:
        content.append([settings.engine.max_model_len])
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def result_line(job: Job, completion: Completion, tokenizer: ModelTokenizer, digest: str) -> dict[str, Any]:
    """What one line of output holds; `digest` is that of the settings."""
    line: dict[str, Any] = {"index": job.prompt.index}
    if job.prompt.identity is not None:
        line["id"] = job.prompt.identity
    return line | {
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

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        self._write = write
        self._early: dict[int, dict[str, Any]] = {}
        self._next = 0

    def add(self, number: int, line: dict[str, Any]) -> None:
        self._early[number] = line
        while self._next in self._early:
            self._write(self._early.pop(self._next))
            self._next += 1


class ResultFile:
    """A JSON lines file that grows; each line is on disk before the next is begun."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep_finished(self, jobs: Sequence[Job], digest: str) -> int:
        """How many of the jobs, from the first on, the file already answers; a line cut short at the end is dropped.

        Raises `UsageError` where the file holds anything else than answers to these jobs with these settings.
        """
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError as error:
            raise UsageError(f"cannot read {self._path}: {error.strerror}") from error
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        for number, line in enumerate(lines, 1):
            self._check(line, number, jobs, digest)
        try:
            with self._path.open("ab") as file:
                file.truncate(len(whole))
        except OSError as error:
            raise UsageError(f"cannot write {self._path}: {error.strerror}") from error
        return len(lines)

    def write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _check(self, line: bytes, number: int, jobs: Sequence[Job], digest: str) -> None:
        place = f"{self._path}:{number}"
        try:
            found = json.loads(line)
            index, inputs, settings = found["index"], found["input_digest"], found["settings_digest"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{place} is no line of results; choose another --output") from error
        if number > len(jobs):
            raise UsageError(f"{place} answers a prompt that is not among the {len(jobs)} given")
        if index != jobs[number - 1].prompt.index or inputs != jobs[number - 1].prompt.digest:
            raise UsageError(f"{place} answers another prompt; choose another --output")
        if settings != digest:
            raise UsageError(f"{place} was written with other settings; choose another --output")
