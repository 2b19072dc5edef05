"""Exact mode: the bits of all logits whatever the policy, batch and draft, on every instruction set of this machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.cpu.isa import AUTO
from engine.models.loading import load_draft_engine, load_target_engine
from engine.settings import EngineSettings
from scheduler.config import Policy, SchedulerConfig
from services.worker.executor import DraftStepExecutor, TargetStepExecutor
from tests.support.cpu_kernels import ISAS, compiled_kernels
from tests.support.in_process import Output, requests_of, run_in_process
from tests.support.tiny_models import SPARSE, TORCH_SHAPE, VOCABULARY, WINDOWED, save_tiny_pair

pytestmark = pytest.mark.slow

SOME = [(policy, 3, 4) for policy in Policy]
# Each two of a policy, a batch size and a draft length together.
GRID = [
    (policy, (1, 3, 8)[(row + column) % 3], (1, 4, 7)[column])
    for row, policy in enumerate(Policy)
    for column in range(3)
]


class Workers:
    """A target and a draft in this process, on one instruction set."""

    def __init__(
        self,
        isa: str,
        target: str,
        draft: str,
        dtype: str,
        max_tokens: int = 48,
        quantization: str = "auto",
        kv_cache_dtype: str = "auto",
        prefix_cache: bool = False,
    ) -> None:
        """`max_tokens` of a step. With `prefix_cache`, later runs find the prompts of those before."""
        settings = [
            EngineSettings(
                model,
                dtype,
                quantization,
                cpu_isa=isa,
                threads=1,
                page_size=16,
                kv_pages=200,
                max_num_batched_tokens=max_tokens,
                kv_cache_dtype=kv_cache_dtype,
            )
            for model in (target, draft)
        ]
        self.workers = {
            "target": TargetStepExecutor(load_target_engine(settings[0], lambda *_: None), prefix_cache=prefix_cache),
            "draft": DraftStepExecutor(load_draft_engine(settings[1], lambda *_: None), prefix_cache=prefix_cache),
        }

    def outputs(self, config: SchedulerConfig, prompts: list[list[int]], max_tokens: int) -> list[Output]:
        """Every second sequence is sampled."""
        requests = requests_of(prompts, max_tokens, (0.0, 0.8))
        workers = self.workers if config.draft_length else {"target": self.workers["target"]}
        outputs = run_in_process(config, workers, requests)
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


# Instruction set, family, sizes other than usual, dtype, and what is compared. The dtypes differ in how kernels load
# and store; with the sizes of TORCH_SHAPE, attention is matrix products in one form.
PAIRS = [
    *((isa, "llama", {"head_dim": 64}, "bfloat16", GRID if isa == ISAS[0] else SOME) for isa in ISAS),
    (AUTO, "llama", {}, "float16", SOME),
    (AUTO, "llama", {"head_dim": 128}, "float32", SOME),
    (AUTO, "llama", TORCH_SHAPE, "bfloat16", SOME),
    *((AUTO, family, {"hidden_size": 128}, "bfloat16", SOME) for family in SPARSE if family not in WINDOWED),
    (AUTO, "glm4", {}, "bfloat16", SOME),
    *((ISAS[0], family, shape, "bfloat16", SOME) for family, shape in WINDOWED.items()),
    *(
        pytest.param(isa, family, shape, "bfloat16", SOME, marks=pytest.mark.long)
        for isa in ISAS[1:]
        for family, shape in WINDOWED.items()
    ),
    (AUTO, "gemma2", TORCH_SHAPE, "bfloat16", SOME),
]


@pytest.mark.parametrize(("isa", "family", "shape", "dtype", "grid"), PAIRS)
def test_tiny_pairs(
    isa: str, family: str, shape: dict[str, Any], dtype: str, grid: Sequence[tuple[Policy, int, int]], tmp_path: Path
) -> None:
    compiled_kernels()
    folders = save_tiny_pair(family, tmp_path, **shape)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (1, 70, 17, 90, 16)]
    Workers(isa, *map(str, folders), dtype).check(prompts, 10, grid)


@pytest.mark.parametrize(
    ("isa", "family", "dtype", "quantization"),
    [
        *((isa, "llama", "bfloat16", quantization) for isa in ISAS for quantization in ("int4", "int8")),
        (AUTO, "qwen3", "float32", "int4"),
        (AUTO, "qwen3", "float16", "int8"),
    ],
)
def test_quantized_pairs(isa: str, family: str, dtype: str, quantization: str, tmp_path: Path) -> None:
    compiled_kernels()
    folders = save_tiny_pair(family, tmp_path, head_dim=64)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (1, 40, 17, 90, 16)]
    workers = Workers(isa, *map(str, folders), dtype, quantization=quantization)
    workers.check(prompts, 10, SOME)


@pytest.mark.parametrize(
    ("isa", "family", "shape", "dtype"),
    [
        *((isa, "llama", {"head_dim": 64}, "bfloat16") for isa in ISAS),
        (AUTO, "llama", {"head_dim": 128}, "float32"),
        ("avx2" if "avx2" in ISAS else AUTO, "llama", {"head_dim": 64}, "float32"),
        (AUTO, "llama", {}, "float16"),
        # Attention by matrix products.
        (AUTO, "llama", TORCH_SHAPE, "bfloat16"),
        (AUTO, "llama", TORCH_SHAPE, "float32"),
        # Keys are written by torch; windows, soft caps and sinks.
        (AUTO, "gemma2", {}, "bfloat16"),
        (AUTO, "gpt_oss", {"hidden_size": 128}, "bfloat16"),
        (AUTO, "qwen3", WINDOWED["qwen3"], "bfloat16"),
    ],
)
def test_pairs_with_quantized_kv(isa: str, family: str, shape: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    compiled_kernels()
    folders = save_tiny_pair(family, tmp_path, **shape)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (1, 40, 17, 90, 16)]
    Workers(isa, *map(str, folders), dtype, kv_cache_dtype="int8", prefix_cache=True).check(prompts, 10, SOME)


def test_the_demo_pair() -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(1000, 20000) for _ in range(length)] for length in (2, 9)]
    Workers(AUTO, "demo", "demo", "auto", max_tokens=16).check(prompts, 4, [(Policy.AUTO, 2, 4)])
