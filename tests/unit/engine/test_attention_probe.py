"""The probe sees a kernel that adds in another order, although rounding hides most of what that changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from spool.engine.attention.backends import AttentionRule, Span
from spool.engine.exactness.attention_probe import AttentionProbe
from spool.engine.kv.paged_kv import LayerKv, PagedKv

PAGE, LONGEST, HEADS, KV_HEADS, DIM = 8, 512, 4, 2, 16
MOST_ROWS = 8


@dataclass
class OneByOne:
    """Attends row by row, in the order of positions, or in the reverse one where the call has one row alone."""

    spans: Sequence[Span]
    reversed_alone: bool

    def attend(self, layer: LayerKv, query: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        out = torch.empty_like(query)
        for span in self.spans:
            for place in range(span.rows):
                seen = span.start + place + 1
                keys, values = layer.pool[:, list(span.pages)].transpose(1, 2).flatten(2, 3)[:, :, :seen]
                row = query[span.first_row + place].view(KV_HEADS, -1, DIM)
                weights = torch.softmax((row @ keys.transpose(1, 2)) * rule.scaling, -1)
                if self.reversed_alone and len(self.spans) == span.rows == 1:
                    weights, values = weights.flip(-1), values.flip(1)
                out[span.first_row + place] = self._sum(weights, values).view(HEADS, DIM)
        return out

    @staticmethod
    def _sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """In float32 and one after the other, then rounded: what a 16-bit kernel does."""
        terms = weights.float().unsqueeze(-1) * values.float().unsqueeze(1)
        return torch.from_numpy(np.add.accumulate(terms.numpy(), axis=2)[:, :, -1]).to(values.dtype)


@dataclass
class Backend:
    reversed_alone: bool

    def plan(self, spans: Sequence[Span], batched_tokens: int) -> OneByOne:
        return OneByOne(spans, self.reversed_alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("reversed_alone", [False, True])
def test_another_order_of_adding_is_seen(dtype: torch.dtype, reversed_alone: bool) -> None:
    pages = AttentionProbe.pages(LONGEST, PAGE)
    kv = PagedKv(1, pages, PAGE, KV_HEADS, DIM, dtype, torch.device("cpu"))
    difference = AttentionProbe(Backend(reversed_alone), kv, HEADS, LONGEST).first_difference(MOST_ROWS)
    assert (difference is not None) == reversed_alone
