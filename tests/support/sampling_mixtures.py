"""Rows of logits with random sampling parameters, mostly at the edges, and which tokens transformers would keep."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from spool.engine.sampling.context import SamplingContext
from spool.engine.sampling.noise import gumbel, row_key
from spool.scheduler.sampling import SamplingParameters

# Sizes next to which code may change its ways: prefixes, buckets and chunks of scans, rows that fill a block.
EDGES = (512, 1024, 8192)
LARGE = (16384, 20000, 32768, 32769, 49152, 65536, 65537, 152000)
PROMPT_LENGTH, POSITION = 20, 50
# Of a weight, for float32 and for being a whole multiple of 2^-34; of a sum of them, the latter for each.
WEIGHT_ERROR, WEIGHT_STEP = 1e-6, 2.0**-34


@dataclass
class Batch:
    """Logits [R, V], in which forbidden tokens have -inf, and a row's parameters for each."""

    logits: Tensor
    rows: list[SamplingContext]


def random_batch(draw: np.random.Generator) -> Batch:
    size = _vocabulary_size(draw)
    count = int(draw.integers(2, 13)) if size < 5000 else 2
    generator = torch.Generator().manual_seed(int(draw.integers(2**62)))
    logits = torch.randn(count, size, generator=generator) * 10 ** draw.uniform(-1.5, 1)
    if draw.random() < 0.3:
        # Ties are the rule, of both zeros too.
        logits = (logits * 2).round() / 2
    for row in range(count):
        if draw.random() < 0.2:
            allowed = torch.rand(size, generator=generator) < draw.choice([0.01, 0.5, 0.99])
            allowed[int(draw.integers(size))] = True
            logits[row, ~allowed] = -torch.inf
    dtype = (torch.float32, torch.bfloat16, torch.float16)[int(draw.choice(3, p=[0.5, 0.4, 0.1]))]
    return Batch(logits.to(dtype), [_row(draw, size) for _ in range(count)])


def _vocabulary_size(draw: np.random.Generator) -> int:
    kind = draw.random()
    if kind < 0.01:
        return int(draw.choice(LARGE))
    if kind < 0.04:
        return int(EDGES[-1] + draw.integers(-2, 3))
    if kind < 0.3:
        return int(draw.choice(EDGES[:-1]) + draw.integers(-2, 3))
    return int(np.exp(draw.uniform(np.log(300), np.log(3000 if kind < 0.95 else 20000))))


def _row(draw: np.random.Generator, size: int) -> SamplingContext:
    top_k = {
        0: 0,
        1: int(draw.choice([1, 2, 40])),
        2: int(draw.choice(EDGES) + draw.integers(-2, 3)),
        3: int(size + draw.integers(-2, 3)),
        4: int(draw.integers(1, size + 1)),
        5: int(np.exp(draw.uniform(0, np.log(size)))),
    }[int(draw.integers(6))]
    top_p = {0: 1.0, 1: draw.uniform(1e-9, 1), 2: 1 - 10 ** draw.uniform(-9, -1), 3: 10 ** draw.uniform(-9, 0)}
    changes = {}
    if draw.random() < 0.1:
        changes = {
            "repetition_penalty": float(draw.choice([1.0, 0.7, 1.3, 5.0])),
            "presence_penalty": float(draw.choice([0.0, -2.0, 0.5])),
            "frequency_penalty": float(draw.choice([0.0, 1.1, -0.3])),
            "bad_words": tuple((int(token),) for token in draw.integers(0, size, draw.integers(4))),
        }
    if draw.random() < 0.1:
        changes["logit_bias"] = {int(token): float(draw.uniform(-100, 100)) for token in draw.integers(0, size, 5)}
    if draw.random() < 0.1:
        changes |= {"min_tokens": 100, "end_token_ids": frozenset(draw.integers(0, size, 3).tolist())}
    sampling = SamplingParameters(
        temperature=float(draw.choice([0.0, 1e-300, 1.0, 10 ** draw.uniform(-2, 2)], p=[0.05, 0.02, 0.43, 0.5])),
        top_k=top_k,
        top_p=float(top_p[int(draw.integers(4))]),
        min_p=float(draw.choice([0.0, 1.0, 10 ** draw.uniform(-12, 0)], p=[0.7, 0.01, 0.29])),
        seed=int(draw.integers(2**63)),
        **changes,
    )
    return SamplingContext(sampling, POSITION, draw.integers(0, size, POSITION).tolist(), PROMPT_LENGTH)


class Expected:
    """What one row [V] gives, by transformers' processors, and by plain arithmetic where these have none.

    Scores are float32, and so are the differences to the largest of them by which tokens are ordered, the lowest id
    first among equal ones. Everything after that is float64.
    """

    def __init__(self, line: Tensor, row: SamplingContext) -> None:
        self._row = row
        self._scores = _changed(line, row)
        temperature = np.float32(max(row.sampling.temperature, 2.0**-126))
        with np.errstate(over="ignore"):
            self._deficits = (self._scores.max() - self._scores) / temperature
        self.order = np.argsort(self._deficits, kind="stable")
        self._finite = int(np.isfinite(self._deficits).sum())

    def may_keep(self, count: int) -> bool:
        """Whether the first `count` tokens in order are those that the filters keep, tokens of no probability aside.

        Only where rounding decides may it be others than transformers keeps.
        """
        sampling, count = self._row.sampling, min(count, self._finite)
        if count == self._kept(sampling.top_p, sampling.min_p):
            return True
        mass_error = WEIGHT_ERROR + len(self.order) * WEIGHT_STEP
        least = self._kept(
            sampling.top_p * (1 - mass_error if sampling.top_p < 1 else 1),
            min(1.0, sampling.min_p * (1 + WEIGHT_ERROR) + WEIGHT_STEP) if sampling.min_p else 0.0,
        )
        most = self._kept(
            min(1.0, sampling.top_p * (1 + mass_error)),
            max(0.0, sampling.min_p * (1 - WEIGHT_ERROR) - WEIGHT_STEP),
        )
        return least <= count <= most

    def _kept(self, top_p: float, min_p: float) -> int:
        """How many tokens transformers' processors leave, from the first in order."""
        # Differences of 10^-12 make its order ours.
        in_order = -np.minimum(self._deficits[self.order].astype(np.float64), 1000) - np.arange(len(self.order)) * 1e-12
        scores = torch.from_numpy(np.where(np.arange(len(in_order)) < self._finite, in_order, -np.inf))[None]
        if self._row.sampling.top_k:
            scores = TopKLogitsWarper(self._row.sampling.top_k)(None, scores)
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(None, scores)
        if min_p > 0:
            scores = MinPLogitsWarper(min_p)(None, scores)
        return int(scores.isfinite().sum())

    def token(self, kept: int) -> int:
        """What is sampled where the first `kept` tokens in order are left."""
        if self._row.sampling.greedy:
            return int(self._scores.argmax())
        tokens = np.sort(self.order[:kept])
        key = torch.tensor(row_key(self._row.sampling.seed, self._row.position))
        return int(tokens[(gumbel(key, torch.from_numpy(tokens)).numpy() - self._deficits[tokens]).argmax()])


def _changed(line: Tensor, row: SamplingContext) -> np.ndarray:
    sampling, scores = row.sampling, line[None].float().clone()
    history = torch.tensor([row.history])
    if sampling.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(history, scores)
    for token, count in Counter(row.history[row.prompt_length :]).items():
        scores[0, token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    if sampling.logit_bias:
        biases = {(token,): bias for token, bias in sampling.logit_bias.items()}
        scores = SequenceBiasLogitsProcessor(biases)(history, scores)
    bad = [word[0] for word in sampling.bad_words]
    scores[0, bad] = scores[0, bad].clamp(max=torch.finfo(torch.float32).min)
    if row.output_tokens < sampling.min_tokens:
        scores = SuppressTokensLogitsProcessor(list(sampling.end_token_ids))(history, scores)
    return scores[0].numpy()
