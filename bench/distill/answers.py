"""What the target generated greedily: as `spool generate` writes it, with the prompts it was asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from deploy.offline.prompts import Prompt, read_prompts
from services.text.tokenizer import ModelTokenizer

NO_CATEGORY = "none"


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what the target wrote after it, greedily; a prompt without tokens where only the answer counts."""

    category: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


class AnswersError(ValueError):
    """A file of answers that cannot be used; the message names file, line and reason."""


class _AnswerLine(BaseModel):
    """What counts of a line that `spool generate` writes."""

    index: int
    tokens: list[int]
    id: Any = None


def read_answers(answers: Path, prompts: Path, tokenizer: ModelTokenizer) -> list[Answer]:
    """What the target generated greedily from `prompts`. Raises `AnswersError`, and `UsageError` for bad prompts."""
    asked = list(read_prompts(prompts))
    try:
        lines = answers.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AnswersError(f"cannot read {answers}: {error}") from error
    found = [
        _answer(line, f"{answers}:{number}", asked, tokenizer) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not found:
        raise AnswersError(f"{answers} holds no answers")
    return found


def _answer(text: str, place: str, asked: Sequence[Prompt], tokenizer: ModelTokenizer) -> Answer:
    try:
        line = _AnswerLine.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        raise AnswersError(f"{place}: {'.'.join(map(str, problem['loc'])) or 'line'}: {problem['msg']}") from error
    if not 0 <= line.index < len(asked):
        raise AnswersError(f"{place}: index is {line.index}, must be at least 0 and below {len(asked)} prompts")
    prompt = asked[line.index]
    if line.id is not None and line.id != prompt.identity:
        raise AnswersError(f"{place}: id is {line.id}, that of the prompt is {prompt.identity}: other prompts")
    if not line.tokens:
        raise AnswersError(f"{place}: tokens is empty, must be at least one")
    return Answer(prompt.category or NO_CATEGORY, tuple(prompt.encode(tokenizer)), tuple(line.tokens))
