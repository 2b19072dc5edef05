"""Exact mode on every instruction set of this machine: bits of all logits, whatever the policy, batch and draft."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.models.loading import load_draft_engine, load_target_engine
from engine.settings import EngineSettings
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import SequenceRequest
from scheduler.sampling import SamplingParameters
from services.worker.executor import DraftStepExecutor, TargetStepExecutor
from tests.support.cpu_kernels import ISAS, compiled_kernels
from tests.support.in_process import Output, run_in_process
from tests.support.tiny_models import VOCABULARY, save_tiny_pair

SOME = [(policy, 3, 4) for policy in Policy]
HEAD_DIMS = (32, 64, 128)


def third_of_the_grid(number: int) -> list[tuple[Policy, int, int]]:
    """Policies, batch sizes and draft lengths: every two of these together. Number 0, 1 and 2 are the whole grid."""
    grid = itertools.product(enumerate(Policy), enumerate((1, 3, 8)), enumerate((1, 4, 7)))
    return [(policy, size, length) for (i, policy), (j, size), (k, length) in grid if (i + j + k) % 3 == number]


DTYPES = ("bfloat16", "float16", "float32")


class Workers:
    """A target and a draft in this process, on one instruction set."""

    def __init__(self, isa: str, target: str, draft: str, dtype: str, max_tokens: int = 64) -> None:
        """`max_tokens` of a step."""
        settings = [
            EngineSettings(
                model, dtype, cpu_isa=isa, threads=1, page_size=16, kv_pages=200, max_num_batched_tokens=max_tokens
            )
            for model in (target, draft)
        ]
        self.workers = {
            "target": TargetStepExecutor(load_target_engine(settings[0], lambda *_: None), prefix_cache=False),
            "draft": DraftStepExecutor(load_draft_engine(settings[1], lambda *_: None), prefix_cache=False),
        }

    def outputs(self, config: SchedulerConfig, prompts: list[list[int]], max_tokens: int) -> list[Output]:
        """Every second sequence is sampled."""
        requests = [
            SequenceRequest(
                index,
                tuple(prompt),
                max_tokens,
                sampling=SamplingParameters(temperature=0.8 * (index % 2), seed=index),
                logits_digests=True,
            )
            for index, prompt in enumerate(prompts)
        ]
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


def pairs() -> Iterator[Any]:
    """The whole grid in bfloat16, a third with each head dimension; what tells dtypes apart is how kernels load and
    store. Of smaller instruction sets one pair is enough for every day."""
    pairs = [
        *(("llama", dim, "bfloat16") for dim in HEAD_DIMS),
        *(("llama", 32, dtype) for dtype in DTYPES[1:]),
        *(("qwen3_moe", 32, dtype) for dtype in DTYPES),
    ]
    for isa in ISAS:
        for pair in pairs:
            daily = pair == pairs[1] if isa != ISAS[0] else pair[0] == "llama" or pair == pairs[5]
            yield pytest.param(isa, *pair, marks=[] if daily else pytest.mark.long)


@pytest.mark.slow
@pytest.mark.parametrize(("isa", "family", "head_dim", "dtype"), list(pairs()))
def test_tiny_pairs(isa: str, family: str, head_dim: int, dtype: str, tmp_path: Path) -> None:
    compiled_kernels()
    folders = save_tiny_pair(family, tmp_path, head_dim=head_dim)
    for folder in folders:
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).save_pretrained(folder)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (1, 40, 17, 90, 16)]
    grid = third_of_the_grid(HEAD_DIMS.index(head_dim)) if (family, dtype) == ("llama", "bfloat16") else SOME
    Workers(isa, *map(str, folders), dtype).check(prompts, 10, grid)


# Without the portable kernels, which take minutes for a model of this size and are those of the tiny pairs.
@pytest.mark.slow
@pytest.mark.parametrize(
    "isa", [pytest.param(isa, marks=pytest.mark.long if isa != ISAS[0] else []) for isa in ISAS if isa != "portable"]
)
def test_the_demo_pair(isa: str) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(1000, 20000) for _ in range(length)] for length in (2, 9)]
    Workers(isa, "demo", "demo", "auto", max_tokens=16).check(prompts, 4, [(Policy.AUTO, 2, 4)])
