"""Log probabilities of tokens in the model's own distribution."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from math import isfinite

import torch

from spool.engine.passes.device import on_device
from spool.engine.sampling.logits_scan import LogitsScan
from spool.scheduler.messages import TokenLogprobs

_BY_TORCH = LogitsScan()


def token_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], count: int, scan: LogitsScan = _BY_TORCH
) -> list[TokenLogprobs]:
    """Of each of the `tokens` in its row of logits `[tokens, vocabulary]`, and of the `count` likeliest tokens there,
    of equal ones the lowest ids. NaN where the row is not finite."""
    if not tokens:
        return []
    rows = scan.logprobs(logits, range(len(tokens)), on_device(tokens, logits.device), count)
    return read_logprobs(tokens, rows.tolist(), count)


def read_logprobs(tokens: Sequence[int], rows: Iterable[Sequence[int]], count: int) -> list[TokenLogprobs]:
    """Of numbers that `LogitsScan.logprobs` gave for as many likeliest tokens or more."""
    found = []
    for token, (own, *likeliest) in zip(tokens, rows, strict=True):
        ids, values = likeliest[: len(likeliest) // 2], _floats(likeliest[len(likeliest) // 2 :])
        # Tokens that a grammar forbids have no probability, and no log of it.
        pairs = [pair for pair in zip(ids[:count], values[:count], strict=True) if isfinite(pair[1])]
        found.append(TokenLogprobs(token, _floats([own])[0], tuple(pairs)))
    return found


def _floats(bits: Sequence[int]) -> Sequence[float]:
    return array("d", array("q", bits).tobytes())
