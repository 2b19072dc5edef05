"""The same weights in transformers' own `generate`, for comparison."""

from __future__ import annotations

import time

import torch
from transformers import GenerationConfig, PreTrainedModel

from bench.gpu.decoding import prompts
from bench.gpu.device import wait_for
from bench.gpu.engines import Bench
from bench.gpu.pair import SHAPES, Pair

_PROMPT_TOKENS = 64


def transformers_generate(bench: Bench, batches: tuple[int, ...], tokens: int) -> None:
    """By scaled-dot-product attention. Greedy, no prefill counted: the time of `tokens` new tokens less that of one."""
    bench.drop()
    model = Pair(SHAPES[bench.shape](), bench.device, bench.dtype).target
    model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    for batch in batches:
        ids = torch.tensor(prompts(batch, _PROMPT_TOKENS, model.config.vocab_size), device=bench.device)
        seconds = {count: _seconds(bench, model, ids, count) for count in (1, tokens)}
        spent = seconds[tokens] - seconds[1]
        bench.findings.add(
            "transformers generate",
            batch=batch,
            tokens_per_second=batch * (tokens - 1) / spent,
            step_ms=spent / (tokens - 1) * 1000,
        )


@torch.inference_mode()
def _seconds(bench: Bench, model: PreTrainedModel, ids: torch.Tensor, count: int) -> float:
    for _ in range(2):
        wait_for(bench.device)
        started = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count)
        wait_for(bench.device)
        seconds = time.perf_counter() - started
    return seconds
