"""Which prompts a benchmark decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.offline.options import BenchInputs
from deploy.errors import UsageError
from deploy.offline.prompts import Prompt, load_prompts


def bench_prompts(inputs: BenchInputs) -> list[Prompt]:
    """Of the categories asked for, evenly spaced, cut to length. Raises `UsageError`."""
    prompts = load_prompts(inputs.prompts, None)
    if inputs.category:
        present = {prompt.category for prompt in prompts if prompt.category is not None}
        for category in inputs.category:
            if category not in present:
                known = ", ".join(sorted(present)) or "none"
                raise UsageError(f"category is {category!r}, must be one of those in the prompts: {known}")
        prompts = [prompt for prompt in prompts if prompt.category in inputs.category]
    if inputs.count is not None:
        prompts = evenly_spaced(prompts, inputs.count)
    if inputs.limit_characters is not None:
        prompts = [cut(prompt, inputs.limit_characters) for prompt in prompts]
    return prompts


def evenly_spaced(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Every n-th, from the first; all where there are fewer."""
    step = max(1, len(prompts) // count)
    return list(prompts[::step][:count])


def cut(prompt: Prompt, characters: int) -> Prompt:
    """The texts of the prompt, each cut to its first `characters`."""
    if prompt.text is not None:
        return replace(prompt, text=prompt.text[:characters])
    messages = tuple({**message, "content": message["content"][:characters]} for message in prompt.messages)
    return replace(prompt, messages=messages)
