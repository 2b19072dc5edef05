"""Attention as its rules define it, row by row in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spool.engine.attention.backends import AttentionRule, Span
from spool.engine.kv.paged_kv import LayerKv


def attended(layer: LayerKv, query: Tensor, rule: AttentionRule, spans: Sequence[Span]) -> Tensor:
    """Of `query` `[rows, heads, head_dim]`, float64; zeros for rows of no span."""
    output = torch.zeros(query.shape, dtype=torch.float64)
    content = layer.content().double()
    for span in spans:
        keys, values = content[:, list(span.pages)].transpose(1, 2).flatten(2, 3)
        for place in range(span.rows):
            seen = span.start + place + 1
            window = slice(max(0, seen - (rule.window or seen)), seen)
            row = query[span.first_row + place].double().view(layer.kv_heads, -1, layer.head_dim)
            scores = row @ keys[:, window].transpose(1, 2) * rule.scaling
            if rule.softcap:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            weights = scores.exp()
            totals = weights.sum(-1, keepdim=True)
            if rule.sinks is not None:
                totals += rule.sinks[: query.shape[1]].double().exp().view(layer.kv_heads, -1, 1)
            output[span.first_row + place] = (weights / totals @ values[:, window]).flatten(0, 1)
    return output
