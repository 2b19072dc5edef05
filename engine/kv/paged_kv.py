"""Keys and values on pages, in tensors."""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from spool.engine.kv.groups import PageGroup, lanes_of
from spool.engine.kv.kv_store import SCALE_BYTES, PageLayout, kv_row_bytes
from spool.engine.passes.device import host_buffer, on_device


class LayerKv:
    """K and V of one layer: K's `[pages, kv_heads, page_size, head_dim]`, and V's, which lie behind K's of all layers.

    Head by head within a page. With `quantized`, a head of a page is int8 codes `[page_size, head_dim]`, and after them
    float32 scales `[page_size]` (`quantized_rows`); `dtype` stays the model's.
    """

    def __init__(
        self,
        pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        quantized: bool = False,
    ) -> None:
        """Raises ValueError where scales would not lie on whole words."""
        self.kv_heads = kv_heads
        self.page_size = page_size
        self.head_dim = head_dim
        self.dtype = dtype
        self.quantized = quantized
        if not quantized:
            self._view(_zeros((2, pages, kv_heads, page_size, head_dim), dtype, device))
            return
        if page_size * head_dim % SCALE_BYTES:
            raise ValueError(
                f"page_size is {page_size}, must be a multiple of {SCALE_BYTES} for quantised KV of heads of "
                f"{head_dim} dimensions"
            )
        size = page_size * kv_row_bytes(head_dim, dtype.itemsize, quantized)
        self._view(_zeros((2, pages, kv_heads, size), torch.int8, device))

    def part(self, first: int, pages: int) -> LayerKv:
        """Some of the pages, which are not copied."""
        part = copy.copy(self)
        part._view(self.pool[:, first : first + pages])
        return part

    def _view(self, pool: torch.Tensor) -> None:
        self.pool = pool
        self.parts: tuple[torch.Tensor, ...] = (pool,)
        """Elements, or codes and scales, `[2, pages, kv_heads, page_size, ...]`."""
        if self.quantized:
            self.parts = _codes_and_scales(pool, self.page_size, self.head_dim)

    @property
    def pages(self) -> int:
        return self.pool.shape[1]

    @property
    def value_pages(self) -> int:
        """How many pages V lies behind K."""
        return self.pool.stride(0) // self.pool.stride(1)

    @property
    def scales(self) -> Sequence[torch.Tensor | None]:
        """Of keys and of values `[pages, kv_heads, page_size]`, where there are any."""
        return self.parts[1].unbind() if self.quantized else (None, None)

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keys and values `[rows, head_dim]` to `rows`, places counted through pages, KV heads and positions. Those of
        fewer dimensions get zeros."""
        if missing := self.head_dim - keys.shape[-1]:
            keys, values = (torch.nn.functional.pad(states, (0, missing)) for states in (keys, values))
        if not self.quantized:
            for pool, states in zip(self.pool, (keys, values), strict=True):
                pool.flatten(0, 2).index_copy_(0, rows, states)
            return
        places = rows // self.page_size, rows % self.page_size
        for which, states in enumerate((keys, values)):
            for part, content in zip(self.parts, quantized_rows(states), strict=True):
                part[which].flatten(0, 1).index_put_(places, content)

    def content(self) -> torch.Tensor:
        """All of it, `[2, pages, kv_heads, page_size, head_dim]` in float32."""
        codes, *scales = self.parts
        return _expanded(codes, *scales) if scales else codes.float()

    def fill(self, content: torch.Tensor) -> None:
        """Writes all of it, `[2, pages, kv_heads, page_size, head_dim]`."""
        contents = quantized_rows(content.to(self.dtype)) if self.quantized else (content,)
        for part, of_part in zip(self.parts, contents, strict=True):
            part.copy_(of_part)


class PagedKv:
    """The KV pool of a model, with one more page than asked for: it takes what padding rows write.

    A page has `lanes`, each with room for `page_size` positions of a layer. A layer has one of them, or as many as its
    group has slices; layers of other groups have the same ones, since a page serves one group at a time. What a layer
    calls a page is a lane of one: page p of the pool in its slice s is page `p + s * pages` of the layer.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        quantized: bool = False,
        groups: Sequence[PageGroup] = (PageGroup(),),
    ) -> None:
        """Raises ValueError as `LayerKv` does."""
        self.page_size = page_size
        self.device = device
        self.quantized = quantized
        self.pages = pages + 1
        self.padding_slot = pages * page_size
        self.groups = tuple(groups)
        self.lanes = lanes_of(groups, layers)
        # Zeros, not garbage: masked positions are multiplied by 0, and 0 times NaN would be NaN.
        whole = LayerKv(self.lanes * self.pages, kv_heads, page_size, head_dim, dtype, device, quantized)
        self._lanes = whole.pool.unflatten(1, (self.lanes, self.pages))
        # [pages, lanes, 2, kv_heads, ...]
        self._by_page = self._lanes.permute(2, 1, 0, *range(3, self._lanes.dim()))
        self.group_of = [0] * layers
        """Of each layer, the place of its group."""
        self.layers = [whole] * layers
        for place, group in enumerate(groups):
            size = group.slices * self.pages
            for number, layer in enumerate(group.layers or range(layers)):
                self.group_of[layer] = place
                self.layers[layer] = whole.part(number * size, size)
        self.addresses = (ctypes.c_void_p * layers)(*(layer.pool.data_ptr() for layer in self.layers))
        """Of the layers' pools: what kernels take."""
        self._head_offsets = torch.arange(kv_heads, device=device) * page_size
        self._page_stride = kv_heads * page_size

    @property
    def value_pages(self) -> int:
        """How many pages V lies behind K."""
        return self.lanes * self.pages

    def places(self, group: int, pages: Sequence[int]) -> Sequence[int]:
        """The pages of the layers of a group that pages of the pool are."""
        slices = self.groups[group].slices
        return pages if slices == 1 else [page + part * self.pages for page in pages for part in range(slices)]

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """`slots` `[rows]`, positions of a layer counted through its pages, as places of `LayerKv.write`: slot by slot,
        `[rows * kv_heads]`."""
        pages, offsets = slots // self.page_size, slots % self.page_size
        return ((pages * self._page_stride + offsets).unsqueeze(1) + self._head_offsets).flatten()

    def read_pages(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy of pages, `[pages, lanes, 2, kv_heads, ...]` as in a layer's pool, on the CPU."""
        # From a GPU in one gather and one copy, to memory that it writes by itself.
        found = self._by_page.index_select(0, on_device(pages, self._lanes.device))
        return host_buffer(found.shape, found.dtype, found.device).copy_(found) if found.is_cuda else found

    def write_pages(self, pages: Sequence[int], content: torch.Tensor) -> None:
        """`content` as from `read_pages`, each page once."""
        device = self._lanes.device
        self._by_page.index_copy_(0, on_device(pages, device), content.to(device, non_blocking=True))

    def scrub(self, group: int, places: Sequence[int], first_offset: int) -> None:
        """Zeroes pages of a group's layers, the first of them from position `first_offset` on."""
        of_group = [layer for layer, place in zip(self.layers, self.group_of, strict=True) if place == group]
        for offset, pages in ((first_offset, places[:1]), (0, places[1:])):
            for part in (part for layer in of_group for part in layer.parts):
                part[:, list(pages), :, offset:] = 0


class PagedKvStore:
    """The pages of a pool as bytes (engine/kv/kv_store.py)."""

    def __init__(
        self, kv: PagedKv, model_id: str, compute_digest: bytes, written: Callable[[int], None] | None = None
    ) -> None:
        """`written` is called with each page whose KV comes from elsewhere."""
        layer, dtype = kv.layers[0], str(kv.layers[0].pool.dtype).removeprefix("torch.")
        shape = (kv.lanes, 2, layer.kv_heads, layer.page_size, layer.pool[0, 0, 0].numel() // layer.page_size)
        self.layout = PageLayout(model_id, dtype, shape, layer.pool.element_size(), compute_digest)
        self._kv = kv
        self._pool = layer.pool
        self._written = written

    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        return [page.tobytes() for page in self._kv.read_pages(pages).flatten(1).view(torch.uint8).numpy()]

    def write_pages(self, pages: Sequence[int], contents: Sequence[bytes]) -> None:
        self.layout.check(contents)
        staging = host_buffer((len(pages), self.layout.page_bytes), torch.uint8, self._pool.device)
        for row, data in zip(staging.numpy(), contents, strict=True):
            row[:] = np.frombuffer(data, np.uint8)
        shape = (len(pages), -1, 2, *self._pool.shape[2:])
        self._kv.write_pages(pages, staging.view(self._pool.dtype).view(shape))
        if self._written is not None:
            for page in pages:
                self._written(page)


def quantized_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of rows `[..., head_dim]`, int8, and their scales, float32 `[...]`: a row's largest magnitude / 127.

    Codes are rounded to nearest, ties to even. A row whose scale would be subnormal counts as zeros; one that is not
    finite has a scale that is not. All kernels that write KV do exactly this.
    """
    rows = rows.float()
    largest = rows.abs().amax(-1)
    # A tensor: on a GPU, torch multiplies by the inverse of a number.
    scales = largest / torch.full_like(largest, 127)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0, scales)
    codes = rows / scales.unsqueeze(-1)
    return torch.where(codes.abs() < 127.5, codes, 0).round().to(torch.int8), scales


def _expanded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """In float32."""
    return codes * scales.unsqueeze(-1)


def _codes_and_scales(heads: torch.Tensor, page_size: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views `[..., page_size, head_dim]` and `[..., page_size]` of heads of pages `[..., bytes]`."""
    codes = heads[..., : page_size * head_dim].unflatten(-1, (page_size, head_dim))
    return codes, heads[..., page_size * head_dim :].view(torch.float32)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU numpy's zeros, which take memory only as they are written to; torch's would touch the whole pool."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
