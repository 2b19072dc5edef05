"""Prompts from a file of questions, for the demo pair."""

from __future__ import annotations

import json
from pathlib import Path

from engine.models.source import resolve_model
from scheduler.messages import Role
from services.text.tokenizer import load_tokenizer

_LONGEST = 1200
"""Characters."""


def read_prompts(questions: Path, count: int) -> list[tuple[int, ...]]:
    """So many of a JSON Lines file with `turns`, evenly spaced over it, as token ids of a chat's first turn."""
    tokenizer = load_tokenizer(str(resolve_model("demo", Role.TARGET).folder))
    rows = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines()]
    chosen = rows[:: max(1, len(rows) // count)][:count]
    return [tuple(tokenizer.encode_chat([{"role": "user", "content": row["turns"][0][:_LONGEST]}])) for row in chosen]
