"""The distribution that sampling parameters make of logits, in float64 numpy from the definitions alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from spool.scheduler.sampling import SamplingParameters


def distribution(
    logits: Sequence[float], sampling: SamplingParameters, history: Sequence[int], prompt_length: int
) -> np.ndarray:
    """After `history`; at temperature 0, that of temperature 1 without filters. Bad words of one token only."""
    scores = np.array(logits, dtype=np.float64)
    for token in set(history):
        scores[token] *= sampling.repetition_penalty if scores[token] < 0 else 1 / sampling.repetition_penalty
    for token, count in Counter(history[prompt_length:]).items():
        scores[token] -= sampling.presence_penalty + count * sampling.frequency_penalty
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    scores[[word[0] for word in sampling.bad_words]] = -np.inf
    scores /= sampling.temperature or 1.0
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    if sampling.greedy:
        return probabilities
    order = sorted(range(len(scores)), key=lambda token: (-probabilities[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        mass = probabilities[order].sum()
        nucleus, total = [], 0.0
        for token in order:
            if total >= sampling.top_p * mass:
                break
            nucleus.append(token)
            total += probabilities[token]
        order = nucleus
    order = [token for token in order if probabilities[token] >= sampling.min_p * probabilities.max()]
    kept = np.zeros_like(probabilities)
    kept[order] = probabilities[order]
    return kept / kept.sum()
