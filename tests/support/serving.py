"""What the tests of the Ray application serve, and what must come out of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import openai

from engine.loading import load_target_engine
from engine.settings import EngineSettings
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import SequenceRequest
from scheduler.sampling import SamplingParameters
from services.step_executor import TargetStepExecutor
from services.tokenizer import ModelTokenizer
from tests.support.in_process import run_in_process

ENGINE = {"page_size": 8, "kv_pages": 1024, "max_packed_rows": 96}


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: str
    seed: int
    max_tokens: int
    temperature: float


def requests(count: int, max_tokens: int) -> list[Ask]:
    """Prompts of several lengths, greedy and sampled."""
    return [
        Ask(f"{number}) Once upon " * (1 + number % 4), number, max_tokens, 0.8 * (number % 2))
        for number in range(count)
    ]


class PlainDecoder:
    """One sequence at a time, one token at a time, by the engine alone."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = ModelTokenizer(folder)
        settings = EngineSettings(str(folder), dtype="float32", threads=1, **ENGINE)
        self._executor = TargetStepExecutor(load_target_engine(settings, lambda *_: None))

    def __call__(self, asked: Sequence[Ask]) -> list[str]:
        config = SchedulerConfig(batch_size=1, window=1, policy=Policy.RAGGED, draft_length=0)
        sequences = [
            SequenceRequest(
                sequence_id=number,
                prompt=tuple(self._tokenizer.encode(ask.prompt)),
                max_tokens=ask.max_tokens,
                stop_token_ids=self._tokenizer.stop_token_ids,
                sampling=SamplingParameters(temperature=ask.temperature, seed=ask.seed),
            )
            for number, ask in enumerate(asked)
        ]
        outputs = run_in_process(config, {"target-0": self._executor}, sequences)
        return [self._tokenizer.decode(outputs[number].tokens) for number in range(len(asked))]


async def stream_all(
    url: str, model: str, asked: Sequence[Ask], on_start: Callable[[], None] | None = None
) -> list[str]:
    """All at once, as the openai package does it; `on_start` is called when every answer has begun."""
    begun = asyncio.Event()
    waiting = len(asked)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=400) as client:

        async def one(ask: Ask) -> str:
            nonlocal waiting
            parts: list[str] = []
            stream = await client.completions.create(
                model=model,
                prompt=ask.prompt,
                max_tokens=ask.max_tokens,
                seed=ask.seed,
                temperature=ask.temperature,
                stream=True,
            )
            async for chunk in stream:
                if not parts:
                    waiting -= 1
                    if waiting == 0:
                        begun.set()
                parts += [choice.text for choice in chunk.choices]
            return "".join(parts)

        answers = [asyncio.create_task(one(ask)) for ask in asked]
        if on_start is not None:
            await begun.wait()
            await asyncio.to_thread(on_start)
        return await asyncio.gather(*answers)
