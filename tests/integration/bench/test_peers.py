"""Other systems beside Spool: transformers in a process of its own, against its own `generate`, prompt by prompt."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from bench.offline.grid import GridPoint, System
from bench.peers.processes import PeerError, PeerModels, Peers
from deploy.offline.decoding import Job
from deploy.offline.prompts import Prompt
from scheduler.sampling import SamplingParameters
from tests.support.tiny_models import VOCABULARY, save_tiny_pair

pytestmark = pytest.mark.slow

BATCHED = GridPoint(System.TRANSFORMERS, 3, exact=None)
ASSISTED = GridPoint(System.ASSISTED, 1, "noisy", 3, None)
VLLM = GridPoint(System.VLLM, 1, exact=None)


@pytest.fixture
def children() -> Callable[[], set[psutil.Process]]:
    """Gives the processes that this one has started since the beginning of the test."""
    before = set(psutil.Process().children())
    return lambda: set(psutil.Process().children()) - before


def jobs() -> list[Job]:
    """Prompts and outputs of different lengths, so that batches are padded and cut."""
    return [
        Job(
            Prompt(index, f"line {index}", "", ()),
            tuple(range(3 + index, 8 + 3 * index)),
            6 + index,
            SamplingParameters(),
        )
        for index in range(5)
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> PeerModels:
    target, draft = save_tiny_pair("llama", tmp_path_factory.mktemp("peers"))
    # A stop token that some outputs reach.
    stops = frozenset({generated(target, jobs()[0], frozenset())[3]})
    return PeerModels(target, {"noisy": draft}, "float32", "auto", "cpu", 1, stops, jobs())


def generated(folder: Path, job: Job, stops: frozenset[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=list(stops) or None, pad_token_id=0)
    inputs = torch.tensor([job.tokens])
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=job.max_tokens)
    found: list[int] = output[0, len(job.tokens) :].tolist()
    assert all(0 <= token < VOCABULARY for token in found)
    return found


def test_batches_and_assistance_give_what_generate_gives_for_one_prompt(
    models: PeerModels, children: Callable[[], set[psutil.Process]]
) -> None:
    expected = [generated(models.target, job, models.stop_token_ids) for job in models.jobs]
    assert len({len(tokens) for tokens in expected}) > 1

    async def run() -> None:
        async with Peers(models, [BATCHED, ASSISTED], None) as peers:
            everything = range(len(models.jobs))
            for point in (BATCHED, ASSISTED, BATCHED):
                tokens, seconds = await peers.measure(point, everything)
                assert tokens == expected
                assert seconds > 0
            tokens, _ = await peers.measure(BATCHED, [4, 1])
            assert tokens == [expected[4], expected[1]]
        assert not children()

    asyncio.run(run())


def test_a_system_that_is_not_there_says_why(models: PeerModels, children: Callable[[], set[psutil.Process]]) -> None:
    async def complaint(peers: Peers, point: GridPoint) -> str:
        with pytest.raises(PeerError) as caught:
            await peers.measure(point, [0])
        return str(caught.value)

    async def run() -> None:
        broken = replace(models, target=models.target / "nothing-here")
        async with Peers(broken, [BATCHED, VLLM], None) as peers:
            assert await complaint(peers, VLLM) == "no --vllm-python was given"
            first = await complaint(peers, BATCHED)
            assert first.startswith("transformers ended with exit code 1: ")
            assert await complaint(peers, BATCHED) == first
        async with Peers(models, [VLLM], Path("/no/such/python")) as peers:
            assert "the Python of vllm cannot be started" in await complaint(peers, VLLM)
        assert not children()

    asyncio.run(run())


def test_a_peer_that_is_killed_is_said_so(models: PeerModels, children: Callable[[], set[psutil.Process]]) -> None:
    async def run() -> None:
        async with Peers(models, [BATCHED], None) as peers:
            await peers.measure(BATCHED, [0])
            (process,) = children()
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(PeerError, match="transformers ended with exit code -9"):
                await peers.measure(BATCHED, [0])

    asyncio.run(run())
