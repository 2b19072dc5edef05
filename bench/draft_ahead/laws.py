"""Costs of pairs of models on GPUs of their own, and how good their drafts are.

A pass over few tokens takes as long as reading the weights, and a little; another token takes the arithmetic of one
token at the peak of an H100 (990 teraflop a second in bfloat16, by its data sheet).
"""

from __future__ import annotations

from bench.virtual_time.rates import Costs

WIRE_SECONDS = 0.0002
"""From the scheduler to a worker, and back."""

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
LONGEST = 8
OUTCOMES = 64
"""Drafts of at most so many tokens, prepared for at most so many outcomes."""
