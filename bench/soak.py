"""Many streaming clients of OpenAI's package on a running server, each answer checked. JSON on the last line.

Every answer must equal the one that the same prompt and seed got before, and in the end the one that plain decoding
(speculation off, one request at a time) gives. Exit code 1 if one does not, or if a request fails.

    python -m bench.soak --url http://127.0.0.1:8000 --clients 64 --seconds 120
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import openai
import psutil

TOPICS = ("rivers", "bread", "the moon", "chess", "bees", "glass", "sleep", "trains")
QUESTIONS = (
    "Tell me one surprising fact about {}.",
    "Write two sentences about {} for a child.",
    "Why do people care about {}?",
    "List three words that go with {}.",
)
MAX_TOKENS = 32


@dataclass
class Outcome:
    seconds: float = 0.0
    responses: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    answers_that_changed: int = 0
    compared_with_plain: int = 0
    unequal_to_plain: int = 0
    memory_mib: list[float] = field(default_factory=list)
    """Proportional set size of the server's processes: after a quarter of the time, then to the end."""


@dataclass(frozen=True)
class Case:
    prompt: str
    seed: int
    temperature: float


class Soak:
    def __init__(self, client: openai.AsyncOpenAI, model: str, clients: int, seconds: float) -> None:
        self._client = client
        self._model = model
        self._clients = clients
        self._seconds = seconds
        self._answers: dict[Case, tuple[str, int]] = {}
        self.outcome = Outcome()

    async def run(self) -> None:
        started = time.monotonic()
        watch = asyncio.create_task(self._watch_memory(started))
        await asyncio.gather(*(self._one_client(index, started) for index in range(self._clients)))
        self.outcome.seconds = time.monotonic() - started
        await watch
        for case, answer in self._answers.items():
            self.outcome.compared_with_plain += 1
            self.outcome.unequal_to_plain += await self._ask(case, speculation=False) != answer

    async def _one_client(self, index: int, started: float) -> None:
        case = case_of(index)
        while time.monotonic() - started < self._seconds:
            try:
                answer = await self._ask(case, speculation=True)
            except openai.OpenAIError as error:
                self.outcome.errors.append(f"{type(error).__name__}: {error}")
                return
            self.outcome.responses += 1
            self.outcome.tokens += answer[1]
            self.outcome.answers_that_changed += self._answers.setdefault(case, answer) != answer

    async def _ask(self, case: Case, speculation: bool) -> tuple[str, int]:
        """Text and number of tokens. Raises openai.OpenAIError, also for a stream that ends without usage."""
        stream = await self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": case.prompt}],
            max_tokens=MAX_TOKENS,
            temperature=case.temperature,
            seed=case.seed,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={} if speculation else {"spool": {"speculation": False}},
        )
        text, finished, tokens = "", False, None
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finished = finished or choice.finish_reason is not None
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        if not finished or tokens is None:
            raise openai.OpenAIError(f"a stream ended early after {text!r}")
        return text, tokens

    async def _watch_memory(self, started: float) -> None:
        await asyncio.sleep(self._seconds / 4)
        while time.monotonic() - started < self._seconds:
            self.outcome.memory_mib.append(await asyncio.to_thread(server_memory_mib))
            await asyncio.sleep(self._seconds / 16)


def case_of(index: int) -> Case:
    question = QUESTIONS[index % len(QUESTIONS)].format(TOPICS[index // len(QUESTIONS) % len(TOPICS)])
    return Case(question, seed=index, temperature=0.8 if index % 2 else 0.0)


def server_memory_mib() -> float:
    """Of the replicas, which Ray names after their deployments."""
    total = 0
    for process in psutil.process_iter(["cmdline"]):
        if "ServeReplica" in " ".join(process.info["cmdline"] or ()):
            try:
                total += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
    return round(total / 2**20, 1)


async def main(arguments: argparse.Namespace) -> int:
    options: dict[str, Any] = {"max_retries": 0, "timeout": 600}
    async with openai.AsyncOpenAI(base_url=f"{arguments.url}/v1", api_key=arguments.key, **options) as client:
        model = (await client.models.list()).data[0].id
        soak = Soak(client, model, arguments.clients, arguments.seconds)
        await soak.run()
    outcome = soak.outcome
    print(json.dumps({"clients": arguments.clients, **asdict(outcome)}))
    failed = outcome.errors or outcome.answers_that_changed or outcome.unequal_to_plain or not outcome.responses
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    sys.exit(asyncio.run(main(parser.parse_args())))
