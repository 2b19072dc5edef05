"""Layers with sliding windows: the tokens of `model.generate` from pages that windows leave, and no pages but those
that layers see."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from spool.engine.models.loading import load_draft_engine, load_target_engine
from spool.engine.settings import EngineSettings
from spool.protos import worker_pb2
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.state.digests import DigestedTokens
from spool.services.worker.executor import StepExecutor
from tests.support.cpu_kernels import ISAS, compiled_kernels
from tests.support.decoding import generated
from tests.support.in_process import executor_of, requests_of, run_in_process
from tests.support.tiny_models import VOCABULARY, WINDOWED, save_tiny_pair

pytestmark = pytest.mark.slow

LENGTHS = (66, 90, 70, 141, 66)
"""More than three windows, and more than the positions of short factors, which `model.generate` goes by."""


def settings_of(folder: Path, dtype: str, isa: str = "auto", **more: Any) -> EngineSettings:
    return EngineSettings(
        str(folder), dtype, cpu_isa=isa, threads=1, page_size=16, kv_pages=200, max_num_batched_tokens=48, **more
    )


def silent(*_: object) -> None:
    pass


@pytest.mark.sampled(6)
@pytest.mark.parametrize("isa", ISAS[:2])
@pytest.mark.parametrize("family", WINDOWED)
def test_texts_are_those_of_generate(family: str, isa: str, tmp_path: Path) -> None:
    """With and without a draft, all in one batch, from a common beginning that is computed once."""
    compiled_kernels()
    folders = save_tiny_pair(family, tmp_path, **WINDOWED[family])
    rng = random.Random(4)
    common = rng.choices(range(VOCABULARY), k=65)
    prompts = [[*common, *rng.choices(range(VOCABULARY), k=length - 65)] for length in LENGTHS]
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32, attn_implementation="eager").eval()
    expected = [generated(model, prompt, 24) for prompt in prompts]
    target = load_target_engine(settings_of(folders[0], "float32", isa), silent)
    assert max(target.description.page_windows) == 20
    draft = load_draft_engine(settings_of(folders[1], "float32", isa), silent)
    workers = {"target": executor_of(target, draft)}
    accepted = 0
    for policy in (Policy.EXSPEC, Policy.AUTO):
        config = SchedulerConfig(batch_size=3, max_running=8, policy=policy, prefill_chunk=24)
        outputs = run_in_process(config, workers, requests_of(prompts, 24))
        assert [outputs[number].tokens for number in range(len(prompts))] == expected
        accepted += sum(count for output in outputs.values() for _, count in output.rounds)
    assert accepted > 20
    assert sum(output.cached for output in outputs.values()) >= 64


def test_pages_are_those_that_layers_see(tmp_path: Path) -> None:
    """Five layers with windows of 20 and one without: a page holds 16 positions of the five, or 80 of the one."""
    folder, _ = save_tiny_pair("gemma3_text", tmp_path, **WINDOWED["gemma3_text"], max_position_embeddings=2048)
    settings = settings_of(folder, "bfloat16")
    engine = load_target_engine(settings, silent)
    executor = StepExecutor(engine, worker_epoch=1, prefix_cache=False)
    tokens = random.Random(6).choices(range(VOCABULARY), k=1500)
    digests, length = DigestedTokens(tokens), 0
    while length < len(tokens):
        end = min(length + 48, len(tokens))
        row = worker_pb2.Row(
            sequence_id=1, kv_len=length, prefix_digest=digests.digest(length), tokens=tokens[length:end]
        )
        if not length:
            row.parameters.prompt_length = len(tokens)
        request = worker_pb2.StepRequest(worker_epoch=1, scheduler_epoch=1, step_id=end, rows=[row])
        reply = executor.execute(request, executor.clock())()
        assert list(reply.rows.kv_lens) == [end]
        length = end
        # The next position sees the last 19 of these.
        in_windows = -(-length // 16) - max(0, length - 19) // 16
        assert engine.pool.total_pages - engine.pool.free_pages == -(-length // 80) + in_windows
    executor.check_integrity()
    page_bytes, of_a_layer = engine.kv_store.layout.page_bytes, 2 * 2 * 32 * 2
    assert page_bytes == 5 * 16 * of_a_layer
    assert engine.description.max_sequence_length == 2048
