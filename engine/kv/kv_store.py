"""How a worker reads and writes whole pages of KV, to move sequences between workers. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

KV_INT8 = "int8"
"""KV as codes of 8 bits, with a scale for each position and KV head of keys and of values."""

SCALE_BYTES = 4


def kv_row_bytes(head_dim: int, element_bytes: int, quantized: bool) -> int:
    """Of the key, or of the value, of one position and KV head."""
    return head_dim + SCALE_BYTES if quantized else head_dim * element_bytes


@dataclass(frozen=True, slots=True)
class PageLayout:
    """What the bytes of a page mean: native byte order, `shape` [lanes, keys and values, heads, positions, elements].

    A lane is that of a layer, or of one of each group (engine/kv/groups.py). Of int8, elements are a position's codes
    and the bytes of its scale; all codes of a head come before its scales. Of a worker of several `ranks`, a page is
    one of each rank, in this shape, one after the other. `compute_digest` names the model's weights and, in exact mode,
    everything else that the bits of KV depend on.
    """

    model_id: str
    dtype: str
    shape: tuple[int, ...]
    element_bytes: int
    compute_digest: bytes = b""
    ranks: int = 1

    @property
    def page_bytes(self) -> int:
        return self.ranks * prod(self.shape) * self.element_bytes

    def check(self, contents: Sequence[bytes]) -> None:
        """Raises ValueError where one is not a page's."""
        for data in contents:
            if len(data) != self.page_bytes:
                raise ValueError(f"a page of {len(data)} bytes came, must be of {self.page_bytes}")


class KvStore(Protocol):
    """The pages of an engine. To be called on the thread that computes; a call takes memory for all of its pages."""

    @property
    def layout(self) -> PageLayout: ...

    def read_pages(self, pages: Sequence[int]) -> list[bytes]: ...

    def write_pages(self, pages: Sequence[int], contents: Sequence[bytes]) -> None:
        """One content for each page. Raises ValueError, before any is written, unless all are as long as a page."""
