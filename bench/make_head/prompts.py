"""What a target is asked for texts to learn from, where there are no prompts of users: it writes them itself.

After a few words it goes on as a user would, or with a passage, about which tasks are then asked. All follows from the
number of a part (texts.py).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.make_head.texts import generate
from spool.services.text.tokenizer import ModelTokenizer

_TOKENS = 128
"""Of what a user asks, or of a passage, at most."""
_TEMPERATURE = 0.8
_START, _END = "<|im_start|>", "<|im_end|>"
_SHORTEST = 12
"""Characters of what is of use."""

_TOPICS = (
    "the sea", "a city", "music", "football", "a famous painter", "the moon", "bread", "an old castle", "computers",
    "the human heart", "rivers", "a war", "elections", "a bridge", "birds", "chess", "medicine", "a storm", "money",
    "trains", "a mountain", "school", "energy", "a novel", "the desert", "cooking", "law", "plants", "a queen",
    "insects", "films", "mathematics", "a hospital", "fish", "the weather", "an island", "coffee", "space", "a company",
    "sleep", "a museum", "languages", "farming", "a robbery", "light", "volcanoes",
)  # fmt: skip
_QUESTIONS = (
    "What is", "What are the", "How do I", "How does", "Why do", "Who was", "Who wrote", "When did", "Where is",
    "In which", "Which", "Can you", "Could you explain", "Explain", "Describe", "Write a", "Write an", "Compose",
    "Imagine", "Give me", "List", "Name", "Compare", "Tell me about", "Suppose", "If a", "A train", "A farmer has",
    "John has", "Sarah buys", "There are", "Each", "Calculate", "Solve", "Find the", "Write a Python function",
    "Implement", "Fix", "Act as", "You are", "Pretend", "Help me", "I want to", "I have", "My", "Is it", "Are there",
    "Does", "Summarize", "Rewrite", "Translate", "Classify", "Evaluate", "Design", "Create", "Plan", "Should", "",
)  # fmt: skip
"""First words of what users ask. The target goes on."""

_PASSAGES = (
    "LONDON - A report about {0} that was published on Monday said that",
    "(News) -- Police said on Friday that {0}",
    "Officials announced that a project about {0}",
    "The history of {0} begins in",
    "Today, {0} is known for",
    "Many people think of {0} as",
    "An article about {0}.\n\n",
    "Once upon a time, there was",
    "Chapter 1. About {0}\n\n",
)
_GERMAN = (
    "Das ist ein Satz auf Deutsch:", "Die Regierung hat", "Am Montag wurde in Berlin", "Er sagte, dass",
    "Der Film erzählt von", "In der Stadt gibt es", "Die Polizei hat den Mann", "Ich habe gestern",
)  # fmt: skip
_SHORT_TASKS = ("Translate German to English: {0}", "Translate the following sentence to English: {0}")
_TASKS = (
    "Summarize: {0}",
    "Summarize the following text in one sentence: {0}",
    "{0}\n\nTL;DR:",
    "Read the text and answer: what is it about?\n\n{0}",
    "Answer the question with the help of these documents.\n\n{0}\n\nQuestion: what is {1}?",
    "Passage: {0}\n\nQuestion: who is named in the passage?\nAnswer:",
    "{0}\n\nList the key facts.",
    "Rewrite this text for a child: {0}",
)


def own_prompts(target: str, tokenizer: ModelTokenizer, number: int, folder: Path, count: int) -> list[dict[str, Any]]:
    """Of part `number`: up to `count` chats, as in a file of prompts. Raises ValueError for a model that knows no turns
    of ChatML."""
    if tokenizer.token_id(_START) is None:
        raise ValueError(f"{target} has no token {_START}, so it cannot ask itself: give prompts")
    drawn = random.Random(number)
    starts = [*itertools.islice(_starts(drawn), count)]
    starting = [{"prompt": start.prompt} for start in starts]
    written = generate(target, folder / "material", starting, number, _TOKENS, _TEMPERATURE)
    asked = [
        {"messages": [{"role": "user", "content": content}]}
        for start, one in zip(starts, written, strict=True)
        if (content := start.task(one["text"])) is not None
    ]
    drawn.shuffle(asked)
    return asked


@dataclass(frozen=True, slots=True)
class _Start:
    """What the target goes on from, and what is asked about it."""

    prompt: str
    first: str
    form: str
    topic: str

    def task(self, written: str) -> str | None:
        content = (self.first + written.split(_END)[0]).strip()
        return self.form.format(content, self.topic) if len(content) >= _SHORTEST else None


def _starts(drawn: random.Random) -> Iterator[_Start]:
    while True:
        topic, kind = drawn.choice(_TOPICS), drawn.random()
        if kind < 0.6:
            first = drawn.choice(_QUESTIONS)
            yield _Start(f"{_START}user\n{first}", first, "{0}", topic)
        elif kind < 0.75:
            first = drawn.choice(_GERMAN)
            yield _Start(first, first, drawn.choice(_SHORT_TASKS), topic)
        else:
            first = drawn.choice(_PASSAGES).format(topic)
            yield _Start(first, first, drawn.choice(_TASKS), topic)
