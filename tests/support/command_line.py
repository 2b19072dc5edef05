"""Runs `spool` as a user does, and makes a small model with a tokenizer for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from subprocess import Popen
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spool.deploy.cli.command_line import run

SPOOL = Path(sys.executable).with_name("spool")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


@dataclass(frozen=True)
class Ended:
    """How a run of `spool` ended."""

    code: int
    out: str
    err: str

    @property
    def summary(self) -> dict[str, Any]:
        """The JSON object in the last line of standard output."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found


def spool(
    *arguments: object,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 500,
    given: str | None = None,
) -> Ended:
    """`given` is its standard input."""
    outcome = subprocess.run(
        [str(SPOOL), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
        capture_output=True,
        text=True,
        input=given,
        timeout=timeout,
        check=False,
    )
    return Ended(outcome.returncode, outcome.stdout, outcome.stderr)


def spool_here(*arguments: object, cwd: Path | str = ".", environment: Mapping[str, str] | None = None) -> Ended:
    """The same in this process, which is quicker, for what starts no others."""
    out, err = StringIO(), StringIO()
    with chdir(cwd), patch.dict(os.environ, environment or {}), redirect_stdout(out), redirect_stderr(err):
        code = run([str(argument) for argument in arguments])
    return Ended(code, out.getvalue(), err.getvalue())


@contextmanager
def started(
    *arguments: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Popen[str]]:
    """`spool` at work, its standard error in a pipe; gone when the block ends, however it ends."""
    command = [str(SPOOL), *map(str, arguments)]
    with Popen(
        command, cwd=cwd, env={**os.environ, **(environment or {})}, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


CHARACTERS = (*map(chr, range(33, 127)), "Ġ", "Ċ")
"""The 96 that ASCII text needs."""


def tokenizer_of(texts: Sequence[str] = CHARACTERS) -> Tokenizer:
    """One token for each of the `texts`, which are numbered in their order."""
    backend = Tokenizer(models.BPE({text: number for number, text in enumerate(texts)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def save_tokenizer(folder: Path, texts: Sequence[str] = CHARACTERS) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(texts), chat_template=CHAT_TEMPLATE)
    tokenizer.save_pretrained(folder)


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path
