"""Texts that a target writes, to learn from: written again from a part's number and prompts, never stored.

Where weights are quantised, the target's tokens are the same on every CPU (docs/exactness.md), so that a part has one
digest.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spool.deploy.offline.prompts import load_prompts
from spool.services.text.tokenizer import ModelTokenizer

_TOKENS = 192
"""Of an answer, at most."""
_TEMPERATURES = {"greedy": 0.0, "sampled": 0.8}
"""Of equal shares of the answers."""
_RUNNING = 128
"""Sequences at a time: the target is busy with them for hours, and no one waits for a token."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's answer. The answer begins at `start`."""

    tokens: Sequence[int]
    start: int


def write_texts(
    target: str, tokenizer: ModelTokenizer, asked: Sequence[dict[str, Any]], number: int, folder: Path
) -> list[Text]:
    """What `target` answers to the prompts of part `number`, in `folder`: greedily first, then the sampled half. What
    lies there already is kept."""
    texts = []
    for place, (kind, temperature) in enumerate(_TEMPERATURES.items()):
        half = len(asked) // 2
        chosen = asked[half:] if place else asked[:half]
        answers = generate(target, folder / kind, chosen, number, _TOKENS, temperature)
        for prompt, answer in zip(load_prompts(_prompts_file(folder / kind), None), answers, strict=True):
            tokens = prompt.encode(tokenizer)
            texts.append(Text([*tokens, *answer["tokens"]], len(tokens)))
    return texts


def digest(texts: Sequence[Text]) -> str:
    """Of all tokens."""
    content = json.dumps([[list(text.tokens), text.start] for text in texts], separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


def generate(
    target: str, stem: Path, prompts: Sequence[dict[str, Any]], seed: int, tokens: int, temperature: float
) -> list[dict[str, Any]]:
    """What `spool generate` answers, in order; it goes on where it was stopped."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    asked, answers = _prompts_file(stem), stem.with_suffix(".answers.jsonl")
    asked.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    command = [sys.executable, "-P", "-m", "spool.deploy.cli.main", "generate", target, "--draft", "none"]
    command += ["--prompts", str(asked), "--output", str(answers), "--seed", str(seed * 1_000_003)]
    command += ["--max-tokens", str(tokens), "--temperature", str(temperature)]
    command += ["--max-num-batched-tokens", str(4 * _RUNNING), "--max-running", str(_RUNNING), "--kv-memory", "3GiB"]
    subprocess.run(command, check=True)
    found = [json.loads(line) for line in answers.read_bytes().splitlines()]
    return sorted(found, key=lambda answer: int(answer["index"]))


def _prompts_file(stem: Path) -> Path:
    return stem.with_suffix(".prompts.jsonl")
