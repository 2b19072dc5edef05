"""Prompts out of JSON lines, and the built-in ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.errors import UsageError
from services.text.chat_template import ChatTemplateError
from services.text.tokenizer import ModelTokenizer

_DEMO_QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "List three fruits and their colours.",
    "What is 12 plus 30? Explain step by step.",
    "Give me a simple recipe for pancakes.",
)
_KINDS = ("prompt", "messages", "turns")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One thing to answer: `text` to continue, or the `messages` of a chat.

    `place` says where it came from, for messages to the user. `identity` is the line's own `id` or `question_id`,
    `category` its own `category`, for measurements.
    """

    index: int
    place: str
    text: str | None
    messages: tuple[dict[str, Any], ...]
    identity: Any = None
    category: str | None = None

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
    """The first `limit` prompts of a file, or of the built-in ones. Raises `UsageError` with file and line."""
    prompts = []
    for prompt in demo_prompts() if path is None else read_prompts(path):
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    if not prompts:
        raise UsageError(f"{path} holds no prompts")
    return prompts


def demo_prompts() -> Iterator[Prompt]:
    for index, question in enumerate(_DEMO_QUESTIONS):
        yield Prompt(index, f"built-in prompt {index + 1}", None, ({"role": "user", "content": question},))


def read_prompts(path: Path) -> Iterator[Prompt]:
    """The prompts of a JSON lines file; empty lines do not count."""
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
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{place}: not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{place}: a JSON {type(content).__name__}, must be an object")
    present = [kind for kind in _KINDS if kind in content]
    if len(present) != 1:
        raise UsageError(f"{place}: has {' and '.join(present) or 'none'} of prompt, messages, turns; must have one")
    identity = content.get("id", content.get("question_id"))
    category = str(content["category"]) if "category" in content else None
    kind = present[0]
    if kind == "prompt":
        return Prompt(index, place, _text(content["prompt"], "prompt", place), (), identity, category)
    if kind == "turns":
        turns = content["turns"]
        if not isinstance(turns, list) or not turns:
            raise UsageError(f"{place}: turns must be a list of at least one text")
        question = {"role": "user", "content": _text(turns[0], "turns[0]", place)}
        return Prompt(index, place, None, (question,), identity, category)
    return Prompt(index, place, None, _messages(content["messages"], place), identity, category)


def _messages(messages: Any, place: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{place}: messages must be a list of at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UsageError(f"{place}: messages[{number}] must be an object with role and content")
        _text(message["content"], f"messages[{number}].content", place)
    return tuple(messages)


def _text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{place}: {name} must be a text that is not empty")
    return value
