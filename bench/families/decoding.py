"""Decoding by an engine alone, without a scheduler: rounds of one batch, with drafts that are mostly wrong."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.pages import PageTable
from engine.steps import VerifyRow
from engine.target import TargetEngine
from scheduler.sampling import SamplingParameters

_GREEDY = SamplingParameters()


def decode(
    engine: TargetEngine, prompts: Sequence[Sequence[int]], new_tokens: int, drafts: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """Of each prompt `new_tokens` tokens, each with the digest of its logits.

    All prompts share the steps. Each round verifies `drafts`, so KV is written that does not stay. Raises RuntimeError
    where a row fails.
    """
    tables = [PageTable() for _ in prompts]
    outputs: list[list[tuple[int, int]]] = [[] for _ in prompts]
    fed: list[Sequence[int]] = list(prompts)
    while any(len(output) < new_tokens for output in outputs):
        rows = [
            VerifyRow(table, feed, drafts, True, [*prompt, *(token for token, _ in output)], len(prompt), _GREEDY, True)
            for table, feed, prompt, output in zip(tables, fed, prompts, outputs, strict=True)
        ]
        for index, row in enumerate(engine.step(rows).rows):
            if row.error is not None:
                raise RuntimeError(row.error)
            outputs[index] += zip(row.tokens, row.logits_digests, strict=True)
            fed[index] = row.tokens[-1:]
    for table in tables:
        engine.pool.free(table)
    return [output[:new_tokens] for output in outputs]
