"""What models make of tokens: by `model.generate`, by a target engine and by a runner alone, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from spool.engine.kv.pages import PagePool, PageTable
from spool.engine.passes.layout import BatchedSequence
from spool.engine.passes.runner import ModelRunner
from spool.engine.steps import VerifyRow
from spool.engine.target import TargetEngine
from spool.scheduler.sampling import SamplingParameters


def generated(model: PreTrainedModel, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
    """By transformers; `options` of `generate`."""
    ids = torch.tensor([prompt], device=model.device)
    chosen = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    output: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **chosen)[0, len(prompt) :].tolist()
    return output


def decoded(
    engine: TargetEngine, prompts: Sequence[Sequence[int]], count: int, drafts: Sequence[int] = ()
) -> list[list[tuple[int, int]]]:
    """Tokens with digests of their logits, the prompts in one batch. Every step also verifies `drafts`, so that KV is
    written and dropped."""
    tables = [PageTable() for _ in prompts]
    outputs: list[list[tuple[int, int]]] = [[] for _ in prompts]
    while any(len(output) < count for output in outputs):
        histories = [
            [*prompt, *(token for token, _ in output)] for prompt, output in zip(prompts, outputs, strict=True)
        ]
        rows = [
            VerifyRow(table, history[table.length :], drafts, True, history, 0, SamplingParameters(), True)
            for table, history in zip(tables, histories, strict=True)
        ]
        for output, outcome in zip(outputs, engine.step(rows).rows, strict=True):
            assert outcome.error is None
            output += zip(outcome.tokens, outcome.logits_digests, strict=True)
    for table in tables:
        engine.pool.free(table)
    return [output[:count] for output in outputs]


@torch.inference_mode()
def paged_logits(runner: ModelRunner, pool: PagePool, tokens: Sequence[int], pieces: Sequence[int]) -> torch.Tensor:
    """Logits `[len(tokens), vocabulary]` of one sequence, fed in pieces of these lengths."""
    table, logits, rest = PageTable(), [], list(tokens)
    for piece in pieces:
        fed, rest = rest[:piece], rest[piece:]
        pool.append(table, piece)
        logits.append(runner.run([BatchedSequence(table, fed, piece)]).logits.clone())
    assert not rest
    pool.free(table)
    return torch.cat(logits)
