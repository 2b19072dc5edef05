"""Prompts out of JSON lines, and the built-in ones."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from spool.deploy.config.problems import problems_of
from spool.deploy.errors import UsageError
from spool.services.text.chat_template import ChatTemplateError
from spool.services.text.tokenizer import ModelTokenizer

_DEMO_QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "List three fruits and their colours.",
    "What is 12 plus 30? Explain step by step.",
    "Give me a simple recipe for pancakes.",
)
_Text = Annotated[str, Field(min_length=1)]


class _Message(BaseModel, extra="allow"):
    role: str
    content: _Text


class _Line(BaseModel):
    """One line of a file of prompts: `prompt` is raw text, `messages` a chat; of `turns` only the first is used."""

    prompt: _Text | None = None
    messages: Annotated[list[_Message], Field(min_length=1)] | None = None
    turns: Annotated[list[_Text], Field(min_length=1)] | None = None
    id: Any = None
    question_id: Any = None
    category: Any = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        present = [kind for kind in ("prompt", "messages", "turns") if getattr(self, kind) is not None]
        if len(present) != 1:
            raise ValueError(f"line has {' and '.join(present) or 'none'} of prompt, messages, turns; must have one")
        return self


@dataclass(frozen=True, slots=True)
class Prompt:
    """One thing to answer: `text` to continue, or the `messages` of a chat.

    `place` says where it came from, for messages to the user. `identity` is the line's own `id` or `question_id`,
    and `category` the domain that it names.
    """

    index: int
    place: str
    text: str | None
    messages: tuple[dict[str, Any], ...]
    identity: Any = None
    category: str = ""

    @property
    def digest(self) -> str:
        """Equal for equal content."""
        content = json.dumps([self.text, self.messages], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(content.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]

    @property
    def shown(self) -> str:
        """What a person would call the prompt."""
        return self.text if self.text is not None else str(self.messages[-1].get("content", ""))

    def encode(self, tokenizer: ModelTokenizer) -> list[int]:
        """Token ids. Raises `UsageError` if the model has no chat template, or one that refuses the messages."""
        try:
            tokens = tokenizer.encode(self.text) if self.text is not None else tokenizer.encode_chat(self.messages)
        except ChatTemplateError as error:
            raise UsageError(f"{self.place}: {error}") from error
        if not tokens:
            raise UsageError(f"{self.place}: the prompt has no tokens")
        return tokens


def load_prompts(path: Path | None, limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of a JSON lines file, or of the built-in ones. Raises `UsageError`."""
    prompts = list(itertools.islice(_demo_prompts() if path is None else _read_prompts(path), limit))
    if not prompts:
        raise UsageError(f"{path} holds no prompts")
    return prompts


def _demo_prompts() -> Iterator[Prompt]:
    for index, question in enumerate(_DEMO_QUESTIONS):
        yield Prompt(index, f"built-in prompt {index + 1}", None, ({"role": "user", "content": question},))


def _read_prompts(path: Path) -> Iterator[Prompt]:
    index = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parse(line, index, f"{path}:{number}")
                    index += 1
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _parse(line: str, index: int, place: str) -> Prompt:
    try:
        found = _Line.model_validate_json(line)
    except ValidationError as error:
        path, message = next(problems_of(error, ()))
        raise UsageError(f"{place}: {'.'.join(path)} {message}".replace(":  ", ": ")) from error
    identity = found.id if found.id is not None else found.question_id
    messages = tuple(message.model_dump() for message in found.messages or ())
    if found.turns is not None:
        messages = ({"role": "user", "content": found.turns[0]},)
    category = "" if found.category is None else str(found.category)
    return Prompt(index, place, found.prompt, messages, identity, category)
