"""Log probabilities of tokens in the model's own distribution."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

import torch

from scheduler.messages import TokenLogprobs


def token_logprobs(logits: Iterable[torch.Tensor], tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Of each of the `tokens` in its row of logits `[vocabulary]`, and of the `count` likeliest tokens there. NaN where
    the row is not finite.

    Computed row by row, so that nothing depends on the batch; only what is asked for is kept of a row.
    """
    own, values, ids = [], [], []
    for line, token in zip(logits, tokens, strict=False):
        logprobs = torch.log_softmax(line.float(), dim=-1)
        top = torch.topk(logprobs, min(count, logprobs.numel()))
        own.append(logprobs[token])
        values.append(top.values)
        ids.append(top.indices)
    if not own:
        return []
    # Three transfers, for which a GPU's host waits once each.
    rows = zip(tokens, torch.stack(own).tolist(), torch.stack(ids).tolist(), torch.stack(values).tolist(), strict=True)
    return [TokenLogprobs(token, logprob, _likeliest(places, found)) for token, logprob, places, found in rows]


def _likeliest(token_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Tokens that a grammar forbids have no probability, and no log of it."""
    pairs = zip(token_ids, logprobs, strict=True)
    return tuple((token_id, logprob) for token_id, logprob in pairs if isfinite(logprob))
