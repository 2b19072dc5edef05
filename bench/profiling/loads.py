"""Loads under which a pair of models is measured: they vary what the costs of its steps depend on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.profiling.text_prompts import TextPrompts
from scheduler.config import Policy, SchedulerConfig
from services.backend.interface import GenerationRequest

SHORT_PROMPT = 16
OUTPUT = 24
ANSWER = 48
"""Tokens of each stream, and of each answer to a whole prompt."""


@dataclass(frozen=True, slots=True)
class Load:
    """Streams that begin together, by their prompts. They draft so many tokens in every round."""

    title: str
    prompts: Sequence[tuple[int, ...]]
    output_tokens: int
    draft_length: int

    def config(self, config: SchedulerConfig) -> SchedulerConfig:
        """That of the load's scheduler."""
        return replace(config, policy=Policy.RAGGED, draft_length=self.draft_length, draft_ahead=0)

    def requests(self) -> list[GenerationRequest]:
        return [GenerationRequest(prompt, self.output_tokens) for prompt in self.prompts]


def cost_loads(config: SchedulerConfig, prompts: TextPrompts, long_prompt: int) -> Iterator[Load]:
    """1, 2, 4 ... streams up to a whole batch with short prompts, one stream and a batch with long ones; each without
    drafts, with half of the draft length and with all of it."""
    batch = config.batch_size
    streams = sorted({1 << power for power in range(batch.bit_length()) if 1 << power < batch} | {batch})
    shapes = [(count, SHORT_PROMPT) for count in streams] + [(count, long_prompt) for count in sorted({1, batch})]
    for length in sorted({0, -(-config.draft_length // 2), config.draft_length}):
        for count, tokens in shapes:
            title = f"streams {count}, prompt tokens {tokens}, draft tokens {length}"
            yield Load(title, [prompts.cut(tokens) for _ in range(count)], OUTPUT, length)


def answers_load(config: SchedulerConfig, prompts: TextPrompts, long_prompt: int) -> Load:
    """Two batches of whole prompts: they say how many draft tokens the target accepts."""
    count = 2 * config.batch_size
    return Load(f"answers to {count} prompts", prompts.whole(count, long_prompt), ANSWER, config.draft_length)
