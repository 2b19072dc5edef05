"""An honest client's streams, and what they waited for."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

_PROMPT = "Name the capital of France, and say what it is known for."


@dataclass
class Streams:
    """`count` streams at a time, one after the other. Times are in seconds; `failures` says what went wrong."""

    http: httpx.AsyncClient
    model: str
    count: int
    max_tokens: int
    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    tokens: int = 0
    received_bytes: int = 0

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.count):
                group.create_task(self._for_ever())

    async def answer(self, prompts: Iterable[str]) -> None:
        """Until each prompt has an answer."""
        remaining = iter(prompts)
        async with asyncio.TaskGroup() as group:
            for _ in range(self.count):
                group.create_task(self._each_of(remaining))

    async def _each_of(self, remaining: Iterator[str]) -> None:
        for prompt in remaining:
            await self._stream(prompt)

    async def _for_ever(self) -> None:
        while True:
            try:
                await self._stream(_PROMPT)
            except httpx.HTTPError as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.1)

    async def _stream(self, prompt: str) -> None:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        arrivals = [time.monotonic()]
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                self.failures.append(f"{answer.status_code}: {(await answer.aread()).decode()[:200]}")
                await asyncio.sleep(0.1)
                return
            async for line in answer.aiter_lines():
                self.received_bytes += len(line) + 1
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        self.failures.append(f"in a stream: {event['error']}")
                        return
                    if any(choice["delta"].get("content") for choice in event["choices"]):
                        arrivals.append(time.monotonic())
        self.first_tokens.append(arrivals[1] - arrivals[0])
        self.gaps += [after - before for before, after in pairwise(arrivals[1:])]
        self.tokens += self.max_tokens

    def figures(self) -> dict[str, Any]:
        """Seconds."""
        return {
            "requests": len(self.first_tokens),
            "failures": self.failures[:20],
            "first_token": _quantiles(self.first_tokens),
            "gap": _quantiles(self.gaps),
        }


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [float("nan")]
    return {
        "median": ordered[len(ordered) // 2],
        "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "longest": ordered[-1],
    }
