"""Keys and values on pages, in tensors."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import torch

from engine.kv.kv_store import PageLayout


class LayerKv:
    """K and V of one layer: K's `[pages, kv_heads, page_size, head_dim]`, then V's, in one tensor.

    Head by head within a page, so that gathered pages of a sequence are matrices as they stand.
    """

    def __init__(
        self, pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.kv_heads = kv_heads
        self.pool = _zeros((2, pages, kv_heads, page_size, head_dim), dtype, device)
        self.chunks = self.pool.view(2 * pages * kv_heads, page_size * head_dim)
        """One row for a page and KV head: what a gather takes."""
        self.rows = self.pool.view(2, pages * kv_heads * page_size, head_dim)
        """One row for a position and KV head of K and of V: what a pass writes."""


class PagedKv:
    """The KV pool of a model, one more page than asked for in every layer: it takes what padding rows write."""

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
        self.page_size = page_size
        self.pages = pages + 1
        self.padding_slot = pages * page_size
        # Zeros, not garbage: masked positions are multiplied by 0, and 0 times NaN would be NaN.
        self.layers = [LayerKv(pages + 1, kv_heads, page_size, head_dim, dtype, device) for _ in range(layers)]
        self.addresses = (ctypes.c_void_p * layers)(*(layer.pool.data_ptr() for layer in self.layers))
        """Of the layers' pools: what kernels take."""
        self._head_offsets = torch.arange(kv_heads, device=device) * page_size
        self._page_stride = kv_heads * page_size

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """`slots` `[rows]`, positions of the pool counted through its pages, as rows of `LayerKv.rows`: slot by slot,
        `[rows * kv_heads]`."""
        pages, offsets = slots // self.page_size, slots % self.page_size
        return ((pages * self._page_stride + offsets).unsqueeze(1) + self._head_offsets).flatten()

    def read_page(self, page: int) -> torch.Tensor:
        """A copy of a page, `[layers, 2, kv_heads, page_size, head_dim]`, on the CPU."""
        return torch.stack([layer.pool[:, page] for layer in self.layers]).cpu()

    def write_page(self, page: int, content: torch.Tensor) -> None:
        """`content` as from `read_page`."""
        for layer, part in zip(self.layers, content.to(self.layers[0].pool.device), strict=True):
            layer.pool[:, page] = part

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies whole pages, each pair from its first to its second. No page is written that is read as well."""
        if not copies:
            return
        sources, destinations = torch.tensor(copies, device=self.layers[0].pool.device).unbind(1)
        for layer in self.layers:
            layer.pool.index_copy_(1, destinations, layer.pool.index_select(1, sources))

    def scrub(self, pages: Sequence[int], first_offset: int) -> None:
        """Zeroes the pages, the first of them from position `first_offset` on."""
        for offset, group in ((first_offset, pages[:1]), (0, pages[1:])):
            for layer in self.layers:
                layer.pool[:, list(group), :, offset:] = 0


class PagedKvStore:
    """The pages of a pool as bytes (engine/kv/kv_store.py)."""

    def __init__(self, kv: PagedKv, model_id: str, compute_digest: bytes) -> None:
        pool = kv.layers[0].pool
        shape = (len(kv.layers), 2, *pool.shape[2:])
        dtype = str(pool.dtype).removeprefix("torch.")
        self.layout = PageLayout(model_id, dtype, shape, pool.element_size(), compute_digest)
        self._kv = kv
        self._dtype = pool.dtype

    def read_page(self, page: int) -> bytes:
        return self._kv.read_page(page).view(torch.uint8).numpy().tobytes()

    def write_page(self, page: int, data: bytes) -> None:
        if len(data) != self.layout.page_bytes:
            raise ValueError(f"a page of {len(data)} bytes came, must be of {self.layout.page_bytes}")
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(self._dtype).view(self.layout.shape)
        self._kv.write_page(page, content)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU numpy's zeros, which take memory only as they are written to; torch's would touch the whole pool."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
