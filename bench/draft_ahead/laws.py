"""Costs of pairs of models on GPUs of their own, and how good their drafts are.

A pass over few tokens takes as long as reading the weights, and a little; another token takes the arithmetic of one
token at the peak of an H100 (990 teraflop a second in bfloat16, by its data sheet).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from bench.virtual_time.rates import Costs, Measured, rate_of
from scheduler.config import Policy

WIRE_SECONDS = 0.0002
"""Each way between the scheduler and a worker."""

PACED = "bench.draft_ahead.paced_worker"
"""The module of a worker that keeps to `Costs`: its settings are these and its draft's `agreement`."""

LAWS = {
    "8B, 0.6B": Costs(base=0.006, row=16e-6, draft_base=0.0008, draft_row=1.2e-6, latency=WIRE_SECONDS, jitter=0.02),
    "70B on 8 GPUs, 1B": Costs(
        base=0.009, row=18e-6, draft_base=0.001, draft_row=2.5e-6, latency=WIRE_SECONDS, jitter=0.02
    ),
}

RANKS = (0.318, 0.128, 0.066, 0.043, 0.026, 0.030, 0.020, 0.010, 0.016, 0.010, 0.013, 0.026, 0.010, 0.013)
"""Of the tokens that are not the draft's first choice, the shares that are its second, its third, and so on.

Counted with the demo pair, all of the vocabulary, greedy: 40 answers of 64 tokens to SpecBench's prompts have 763
positions at which the draft is surest and right in 60 %. Of the other 305, 27 % are none of its first 15 choices.
"""
AGREEMENTS = (0.6, 0.7, 0.8)
BATCH_SIZES = (2, 4, 8, 16, 32)
LONGEST = 8
OUTCOMES = 64
"""Drafts of at most so many tokens, prepared for at most so many outcomes."""


def rate(
    costs: Costs,
    agreement: float,
    *,
    batch_size: int = 1,
    draft_length: int | None = None,
    outcomes: int = 0,
    batches: int = 1,
) -> Measured:
    """Of a pool of so many batches: with this draft length in every round, or as AUTO chooses, up to `LONGEST`."""
    return rate_of(
        costs,
        lambda _id, _position: agreement,
        policy=Policy.AUTO if draft_length is None else Policy.RAGGED,
        draft_length=LONGEST if draft_length is None else draft_length,
        batch_size=batch_size,
        sequences=batch_size * batches,
        tokens_each=3000 if batch_size == 1 else 600,
        draft_ahead=outcomes,
        ranks=RANKS,
    )


def in_virtual_time(say: Callable[[str], None]) -> dict[str, Any]:
    """A stream against the best fixed length of ordinary speculation, and batches against ordinary speculation."""
    streams, batches = [], []
    for name, costs in LAWS.items():
        for agreement in AGREEMENTS:
            ordinary = {length: rate(costs, agreement, draft_length=length).rate for length in range(1, LONGEST + 1)}
            best = max(ordinary, key=ordinary.__getitem__)
            plain = rate(costs, agreement, draft_length=0).rate
            ahead = rate(costs, agreement, outcomes=OUTCOMES)
            streams.append(
                {
                    "law": name,
                    "agreement": agreement,
                    "plain": plain,
                    "ordinary": ordinary[best],
                    "ordinary_length": best,
                    "ahead": ahead.rate,
                    "ratio": ahead.rate / ordinary[best],
                    "found": ahead.snapshot.outcomes_found / ahead.snapshot.outcomes_sought,
                }
            )
            say(f"{name}, {agreement}: {streams[-1]['ratio']:.3f} times ordinary speculation")
            for size in BATCH_SIZES:
                without = rate(costs, agreement, batch_size=size).rate
                with_it = rate(costs, agreement, batch_size=size, outcomes=OUTCOMES).rate
                batches.append(
                    {"law": name, "agreement": agreement, "batch_size": size, "ordinary": without, "ahead": with_it}
                )
                say(f"{name}, {agreement}, batch {size}: {with_it / without:.3f} times AUTO without")
    laws = {name: asdict(costs) for name, costs in LAWS.items()}
    return {
        "laws": laws,
        "ranks": RANKS,
        "outcomes": OUTCOMES,
        "longest": LONGEST,
        "streams": streams,
        "batches": batches,
    }
