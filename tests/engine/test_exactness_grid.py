"""Exact mode: the bits of all logits whatever the policy, batch and draft, on every instruction set of this machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spool.engine.cpu.isa import AUTO
from spool.engine.models.loading import load_draft_engine, load_target_engine
from spool.engine.settings import EngineSettings
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.messages import SequenceRequest
from spool.scheduler.sampling import SamplingParameters
from tests.support.cpu_kernels import ISAS, compiled_kernels
from tests.support.in_process import Output, executor_of, requests_of, run_in_process
from tests.support.tiny_models import SPARSE, TORCH_SHAPE, VOCABULARY, WINDOWED, save_tiny_pair

pytestmark = pytest.mark.slow

SOME = [(policy, 3, 4) for policy in Policy]
# Each two of a policy, a batch size and a draft length together.
GRID = [
    (policy, (1, 3, 8)[(row + column) % 3], (1, 4, 7)[column])
    for row, policy in enumerate(Policy)
    for column in range(3)
]


class Worker:
    """A target with a draft inside, on one instruction set."""

    def __init__(self, isa: str, target: str, draft: str, prefix_cache: bool = False, **settings: Any) -> None:
        """With `prefix_cache`, later runs find the prompts of those before."""
        sizes = {"threads": 1, "page_size": 16, "kv_pages": 200, "max_num_batched_tokens": 48}
        of_target, of_draft = (EngineSettings(model, cpu_isa=isa, **(sizes | settings)) for model in (target, draft))
        engines = load_target_engine(of_target, lambda *_: None), load_draft_engine(of_draft, lambda *_: None)
        self.workers = {"target": executor_of(*engines, prefix_cache=prefix_cache)}

    def outputs(self, config: SchedulerConfig, prompts: list[list[int]], max_tokens: int) -> list[Output]:
        """Every second sequence is sampled."""
        requests = requests_of(prompts, max_tokens, (0.0, 0.8))
        outputs = run_in_process(config, self.workers, requests)
        return [outputs[index] for index in range(len(prompts))]

    def check(self, prompts: list[list[int]], max_tokens: int, grid: Sequence[tuple[Policy, int, int]]) -> None:
        plainly = SchedulerConfig(batch_size=1, max_running=1, draft_length=0)
        plain = self.outputs(plainly, prompts, max_tokens)
        assert all(len(output.logits_digests) == max_tokens for output in plain)
        assert len({tuple(output.logits_digests) for output in plain}) == len(prompts)
        for policy, batch_size, draft_length in grid:
            config = SchedulerConfig(
                batch_size=batch_size, max_running=8, policy=policy, draft_length=draft_length, prefill_chunk=24
            )
            for output, expected in zip(self.outputs(config, prompts, max_tokens), plain, strict=True):
                assert output.tokens == expected.tokens
                assert output.logits_digests == expected.logits_digests


HEADS = {"head_dim": 64}
KV8 = {"kv_cache_dtype": "int8", "prefix_cache": True}
# Instruction set, family, sizes other than usual, dtype, and other settings. The dtypes differ in how kernels load and
# store; with the sizes of TORCH_SHAPE, heads are filled up with zeros.
PAIRS: list[Any] = [
    *((isa, "llama", HEADS, "bfloat16", {}) for isa in ISAS),
    (AUTO, "llama", {}, "float16", {}),
    (AUTO, "llama", {"head_dim": 128}, "float32", {}),
    (AUTO, "llama", TORCH_SHAPE, "bfloat16", {}),
    *((AUTO, family, {"hidden_size": 128}, "bfloat16", {}) for family in SPARSE if family not in WINDOWED),
    (AUTO, "glm4", {}, "bfloat16", {}),
    *((ISAS[0], family, shape, "bfloat16", {}) for family, shape in WINDOWED.items()),
    *(
        pytest.param(isa, family, shape, "bfloat16", {}, marks=pytest.mark.long)
        for isa in ISAS[1:]
        for family, shape in WINDOWED.items()
    ),
    (AUTO, "gemma2", TORCH_SHAPE, "bfloat16", {}),
    # Weights in codes.
    *((isa, "llama", HEADS, "bfloat16", {"quantization": bits}) for isa in ISAS for bits in ("int4", "int8")),
    (AUTO, "qwen3", HEADS, "float32", {"quantization": "int4"}),
    (AUTO, "qwen3", HEADS, "float16", {"quantization": "int8"}),
    # KV in codes; with the sizes of TORCH_SHAPE, of heads that are filled up.
    *((isa, "llama", HEADS, "bfloat16", KV8) for isa in ISAS),
    (AUTO, "llama", {"head_dim": 128}, "float32", KV8),
    ("avx2" if "avx2" in ISAS else AUTO, "llama", HEADS, "float32", KV8),
    (AUTO, "llama", {}, "float16", KV8),
    (AUTO, "llama", TORCH_SHAPE, "bfloat16", KV8),
    (AUTO, "llama", TORCH_SHAPE, "float32", KV8),
    # Keys are written by torch; windows, soft caps and sinks.
    (AUTO, "gemma2", {}, "bfloat16", KV8),
    (AUTO, "gpt_oss", {"hidden_size": 128}, "bfloat16", KV8),
    (AUTO, "qwen3", WINDOWED["qwen3"], "bfloat16", KV8),
]


@pytest.mark.parametrize(("isa", "family", "shape", "dtype", "settings"), PAIRS)
def test_tiny_pairs(
    isa: str, family: str, shape: dict[str, Any], dtype: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    compiled_kernels()
    folders = save_tiny_pair(family, tmp_path, **shape)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (1, 70, 17, 90, 16)]
    is_usual = (isa, family, settings) == (ISAS[0], "llama", {})
    Worker(isa, *map(str, folders), dtype=dtype, **settings).check(prompts, 10, GRID if is_usual else SOME)


def test_what_filters_keep_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    """Requests whose filters keep many tokens decode with others whose filters keep few."""
    target, draft = map(str, save_tiny_pair("llama", tmp_path, vocab_size=6000))
    workers = Worker(AUTO, target, draft).workers
    samplings = [
        SamplingParameters(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        for seed in range(2)
        for temperature in (0.8, 1.0, 1.2)
        for top_k, top_p in ((600, 0.5), (0, 0.999), (3000, 0.8), (40, 0.9))
    ]
    requests = [
        SequenceRequest(number, (7, number), 12, sampling=sampling) for number, sampling in enumerate(samplings)
    ]
    alone = run_in_process(SchedulerConfig(batch_size=1, max_running=1, draft_length=0), workers, requests)
    config = SchedulerConfig(batch_size=12, max_running=24, policy=Policy.RAGGED, draft_length=3)
    together = run_in_process(config, workers, requests)
    assert {number: output.tokens for number, output in together.items()} == {
        number: output.tokens for number, output in alone.items()
    }


def test_the_demo_pair() -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(1000, 20000) for _ in range(length)] for length in (2, 9)]
    Worker(AUTO, "demo", "demo", max_num_batched_tokens=16).check(prompts, 4, [(Policy.AUTO, 2, 4)])
