"""Keys and values on pages, and one forward pass's view of them through transformers' `Cache`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from transformers import Cache

from engine.attention import AttentionPlan


class PagedKv:
    """K and V of every layer, each `[pages + 1, page_size, kv_heads, head_dim]`; the last page takes padding rows."""

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (pages + 1, page_size, kv_heads, head_dim)
        self.page_size = page_size
        self.padding_slot = pages * page_size
        # Zeros, not garbage: masked positions are multiplied by 0, and 0 times NaN would be NaN.
        self.keys = [_zeros(shape, dtype, device) for _ in range(layers)]
        self.values = [_zeros(shape, dtype, device) for _ in range(layers)]

    def scrub(self, pages: Sequence[int], first_offset: int) -> None:
        """Zeroes the pages, the first of them from position `first_offset` on."""
        for offset, group in ((first_offset, pages[:1]), (0, pages[1:])):
            for pool in (*self.keys, *self.values):
                pool[list(group), offset:] = 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU numpy's zeros, which take memory only as they are written to; torch's would touch the whole pool."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class PagedStep(Cache):
    """One forward pass over packed rows: where its new K/V go, and how its rows attend.

    Handed to the model as `past_key_values` (transformers calls `update` in every layer) and once more as the keyword
    `paged_step`, which reaches the attention function unchanged.
    """

    def __init__(self, kv: PagedKv, slots: torch.Tensor, plan: AttentionPlan) -> None:
        """`slots`: int64 `[rows]`, flat position in the pool of each packed row's K/V."""
        super().__init__(layers=[])
        self.kv = kv
        self.slots = slots
        self.plan = plan

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes `[1, kv_heads, rows, head_dim]` to the pages; the attention reads them from there."""
        for pool, states in ((self.kv.keys[layer_idx], key_states), (self.kv.values[layer_idx], value_states)):
            pool.flatten(0, 1).index_copy_(0, self.slots, states[0].transpose(0, 1))
        return key_states, value_states
