"""Applications on Ray for tests, and the right answers of their models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import yaml

from bench.chaos.application import Application
from bench.chaos.streams import Answer, Case
from spool.engine.models.loading import load_target_engine
from spool.engine.settings import EngineSettings
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.messages import SequenceRequest
from spool.scheduler.sampling import Grammar, SamplingParameters
from spool.services.gateway.grammar_check import definition
from spool.services.text.tokenizer import ModelTokenizer
from spool.services.worker.executor import StepExecutor
from tests.support.changed_workers import slow_steps
from tests.support.command_line import spool
from tests.support.in_process import run_in_process
from tests.support.ports import free_ports
from tests.support.ray_cluster import RayCluster

BATCHED_TOKENS = 96
ENGINE = {"kv_memory": 8 << 20, "max_num_batched_tokens": BATCHED_TOKENS}
"""KV is not a share of this machine's memory, which other tests use too."""
PACED: dict[str, Any] = {"threads": 1, "environment": slow_steps(0.02)}
"""Workers that leave the processors to others between steps, so that replicas start soon while streams go on."""


class PlainDecoder:
    """One sequence at a time, one token at a time, by the engine alone; answers are kept for the next call."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self._tokenizer = ModelTokenizer(folder)
        settings = EngineSettings(
            str(folder), dtype=dtype, threads=1, kv_pages=512, max_num_batched_tokens=BATCHED_TOKENS
        )
        self._executor = StepExecutor(load_target_engine(settings, lambda *_: None))
        self._answers: dict[Case, str] = {}

    def __call__(self, asked: Sequence[Case]) -> list[str]:
        config = SchedulerConfig(batch_size=1, max_running=1, policy=Policy.RAGGED, draft_length=0)
        sequences = [self._request(number, case) for number, case in enumerate(asked) if case not in self._answers]
        outputs = run_in_process(config, {"target-0": self._executor}, sequences)
        for number, output in outputs.items():
            self._answers[asked[number]] = self._tokenizer.decode(output.tokens)
        return [self._answers[case] for case in asked]

    def _request(self, number: int, case: Case) -> SequenceRequest:
        prompt = self._tokenizer.encode(case.prompt) if isinstance(case.prompt, str) else case.prompt
        ends = frozenset(case.stop_token_ids)
        grammar = Grammar(definition("regex", case.regex), ends) if case.regex else None
        return SequenceRequest(
            sequence_id=number,
            prompt=tuple(prompt),
            max_tokens=case.max_tokens,
            stop_token_ids=self._tokenizer.stop_token_ids | ends,
            sampling=SamplingParameters(temperature=case.temperature, seed=case.seed, grammar=grammar),
        )


def oracle(plain: PlainDecoder, asked: Sequence[Case]) -> dict[Case, Answer]:
    """The right answers; a token is a character."""
    return {case: Answer(text, case.max_tokens) for case, text in zip(asked, plain(asked), strict=True)}


async def stream_all(
    url: str, model: str, asked: Sequence[Case], on_start: Callable[[], None] | None = None
) -> list[str]:
    """All at once, as the openai package does it; `on_start` is called when every answer has begun."""
    begun = asyncio.Event()
    waiting = len(asked)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=400) as client:

        async def one(case: Case) -> str:
            nonlocal waiting
            parts: list[str] = []
            stream = await client.completions.create(
                model=model,
                prompt=case.prompt,
                max_tokens=case.max_tokens,
                seed=case.seed,
                temperature=case.temperature,
                stream=True,
            )
            async for chunk in stream:
                if not parts:
                    waiting -= 1
                    if waiting == 0:
                        begun.set()
                parts += [choice.text for choice in chunk.choices]
            return "".join(parts)

        answers = [asyncio.create_task(one(case)) for case in asked]
        if on_start is not None:
            await begun.wait()
            await asyncio.to_thread(on_start)
        return await asyncio.gather(*answers)


@contextmanager
def served_on(cluster: RayCluster, configuration: Mapping[str, Any], folder: Path) -> Iterator[Application]:
    """`spool serve --detach` on a Ray that is there, on free ports; `spool down` at the end. `configuration`, with
    these ports, becomes spool.yaml in `folder`."""
    http_port, grpc_port = free_ports(2)
    gateway = {**configuration.get("gateway", {}), "port": http_port, "grpc_port": grpc_port}
    file = folder / "spool.yaml"
    file.write_text(yaml.safe_dump({**configuration, "gateway": gateway, "ray": {"address": cluster.address}}))
    environment = {**cluster.environment, "SPOOL_STATE": str(folder / "state")}
    ended = spool("serve", "--config", file, "--detach", environment=environment)
    assert ended.code == 0, ended.err
    served_name = configuration["models"]["served_model_name"]
    url = f"http://127.0.0.1:{http_port}"
    yield Application(url, f"127.0.0.1:{grpc_port}", served_name, cluster.process_id, environment)
    ended = spool("down", environment=environment)
    assert ended.code == 0, ended.err
