"""A forward pass as transformers sees it: a `Cache` that writes to pages, and an attention function that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, Cache

from spool.engine.attention.backends import AttentionPlan, AttentionRule
from spool.engine.errors import UnsupportedModelError
from spool.engine.kv.paged_kv import PagedKv

ATTENTION_NAME = "spool_paged"
# Families whose layers do not tell attention of their windows.
_UNTOLD_WINDOWS = ("phimoe", "qwen2_moe")


@dataclass(slots=True)
class GroupStep:
    """Of the layers of one group: where the new K/V of a pass go, and how its rows attend. `slots`: int64 `[rows]`,
    position among the pages of a layer of each row's K/V; `rows`: those of `PagedKv.rows`, once they are asked for."""

    slots: torch.Tensor
    plan: AttentionPlan
    rows: torch.Tensor | None = None


class PagedStep(Cache):
    """One forward pass over a batch, by the groups of the KV's layers.

    Handed to the model as `past_key_values` (transformers calls `update` in every layer) and once more as the keyword
    `paged_step`, which reaches the attention function unchanged.
    """

    def __init__(self, kv: PagedKv, groups: Sequence[GroupStep]) -> None:
        super().__init__(layers=[])
        self.kv = kv
        self.groups = groups
        self._rotation: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, layer: int) -> GroupStep:
        return self.groups[self.kv.group_of[layer]]

    def attend(self, layer: int, query: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """`query` `[rows, heads, head_dim]` over the pages of a layer; gives the same shape."""
        return self.of(layer).plan.attend(self.kv.layers[layer], query, rule)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' way to `write`: `[1, kv_heads, rows, head_dim]`; the attention reads them from the pages."""
        self.write(layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        return key_states, value_states

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes `[rows, kv_heads, head_dim]` to the pages."""
        group = self.of(layer)
        if group.rows is None:
            group.rows = self.kv.rows(group.slots)
        flat = (states.reshape(-1, states.shape[-1]) for states in (keys, values))
        self.kv.layers[layer].write(group.rows, *flat)

    def rotation(self, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The `signed_rotation` of the pass, the same for every layer."""
        if self._rotation is None:
            self._rotation = signed_rotation(position_embeddings)
        return self._rotation


def signed_rotation(position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of cosines and sines `[1, rows, head_dim]`: cosines, and sines whose first half is negated, float32
    `[rows, 1, head_dim]`. A rotation by halves multiplies a row and its halves swapped with them."""
    cos, sin = (values[0].unsqueeze(1).float() for values in position_embeddings)
    first, second = sin.chunk(2, dim=-1)
    return cos, torch.cat((-first, second), dim=-1)


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged_step: PagedStep | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if paged_step is None:
        raise UnsupportedModelError("the model does not pass keyword arguments on to its attention")
    if attention_mask is not None:
        raise UnsupportedModelError("the model masks its attention by itself")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError("the model's attention sees later positions")
    for name in ("head_mask", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"the model's attention uses {name}, which paged attention does not support")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.detach().float()
    window = _untold_window(module) if sliding_window is None else sliding_window
    rule = AttentionRule(scaling, window or None, softcap or None, sinks)
    output = paged_step.attend(module.layer_idx, query[0].transpose(0, 1), rule)
    return output.unsqueeze(0), None


def _untold_window(module: torch.nn.Module) -> int | None:
    """Of a layer of a family that leaves its windows to masks."""
    config: Any = getattr(module, "config", None)
    if getattr(config, "model_type", None) not in _UNTOLD_WINDOWS:
        return None
    types = getattr(config, "layer_types", None)
    return config.sliding_window if types is None or types[module.layer_idx] == "sliding_attention" else None


AttentionInterface.register(ATTENTION_NAME, _paged_attention)
