"""The tokens that the draft may propose: the most frequent of what the target wrote (FR-Spec, arXiv 2502.14856)."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.distill.dialogue import TokenKind
from bench.distill.shards import Shard
from engine.models.draft_vocabulary import FIELD_NAME

# The draft proposes answers, most of them greedy; the rest of the text decides where answers are few.
_WEIGHTS = {TokenKind.FORCED: 0, TokenKind.USER: 1, TokenKind.GREEDY: 4, TokenKind.SAMPLED: 1}


def count_tokens(shards: Iterable[Shard], vocabulary_size: int) -> Tensor:
    """How often each token was written, [V] int64, weighted by kind."""
    counts = torch.zeros(vocabulary_size, dtype=torch.int64)
    for shard in shards:
        token_ids, kinds = shard.token_ids_and_kinds()
        for kind, weight in _WEIGHTS.items():
            counts += weight * torch.bincount(token_ids[kinds == kind].long(), minlength=vocabulary_size)
    return counts


def choose_vocabulary(counts: Tensor, size: int, always: Collection[int]) -> list[int]:
    """The `size` tokens with the highest counts, and `always`: ascending ids.

    Of equal counts the lower id comes first: tokenizers that merge pairs number frequent tokens first. Raises
    `ValueError` naming field, value and limit.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(
            f"the draft vocabulary's size is {size}, must be at least 1 and at most the target's, {len(counts)}"
        )
    frequent = torch.sort(counts, descending=True, stable=True).indices[:size].tolist()
    return sorted({*frequent, *always})


def store_vocabulary(path: Path, token_ids: Sequence[int]) -> None:
    path.write_text(json.dumps({FIELD_NAME: list(token_ids)}, separators=(",", ":")) + "\n", encoding="utf-8")
