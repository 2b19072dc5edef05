"""Streams over HTTP: all of their tokens are counted, also of those that end while others are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bench.serving.streams import ask_all
from deploy.offline.prompts import Prompt


class Turns:
    """Answers prompt i with i + 1 tokens, as many turns of the event loop later."""

    async def ask(self, prompt: Prompt, seed: int, on_delivery: Callable[[], None]) -> int:
        for _ in range(seed + 1):
            await asyncio.sleep(0)
            on_delivery()
        return seed + 1


def test_tokens_of_streams_that_overlap_add_up() -> None:
    prompts = [Prompt(number, f"line {number}", str(number), ()) for number in range(9)]
    for streams in (1, 4, 9):
        tokens, seconds = asyncio.run(ask_all(Turns(), prompts, streams))
        assert tokens == sum(range(1, 10))
        assert seconds > 0
