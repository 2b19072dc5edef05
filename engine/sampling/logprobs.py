"""Log probabilities of tokens in the model's own distribution."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

import torch

from engine.sampling.logits_shaping import in_order
from scheduler.messages import TokenLogprobs


def token_logprobs(logits: Iterable[torch.Tensor], tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Of each of the `tokens` in its row of logits `[vocabulary]`, and of the `count` likeliest tokens there, of equal
    ones the lowest ids. NaN where the row is not finite.

    Computed row by row, so that nothing depends on the batch; only what is asked for is kept of a row.
    """
    own, values, ids = [], [], []
    for line, token in zip(logits, tokens, strict=False):
        # A copy, which begins at the same alignment for every row: on a GPU, the order of sums depends on it.
        scores = line.to(torch.float32, copy=True)
        logprobs = torch.log_softmax(scores, dim=-1)
        likeliest = in_order((scores.amax() - scores + 0.0)[None], min(count, len(scores)))[0]
        own.append(logprobs[token])
        values.append(logprobs[likeliest])
        ids.append(likeliest)
    if not own:
        return []
    # Three transfers, for which a GPU's host waits once each.
    rows = zip(tokens, torch.stack(own).tolist(), torch.stack(ids).tolist(), torch.stack(values).tolist(), strict=True)
    # Tokens that a grammar forbids have no probability, and no log of it.
    return [
        TokenLogprobs(token, own, tuple(pair for pair in zip(places, found, strict=True) if isfinite(pair[1])))
        for token, own, places, found in rows
    ]
