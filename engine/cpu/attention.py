"""Attention over paged KV by a kernel that reads the pages where they lie: no gather, no mask, no padded length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from spool.engine.attention.backends import AttentionRule, Span, cut_into_blocks
from spool.engine.cpu.kernels import AttentionBlocks, CpuKernels, LayerPass
from spool.engine.kv.paged_kv import LayerKv, PagedKv

# Rows of a sequence that share the unpacking of a page; more of them leave less to share out among threads.
_BLOCK_ROWS = 8


class KernelPlan:
    def __init__(self, kernels: CpuKernels, blocks: AttentionBlocks) -> None:
        self._kernels = kernels
        self._blocks = blocks

    @property
    def longest(self) -> int:
        """Positions of the longest sequence."""
        return self._blocks.longest

    def layer_pass(
        self,
        kv: PagedKv,
        slots: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        scratch: torch.Tensor,
    ) -> LayerPass:
        """What whole layers of one group by kernel share in a pass; keeps none of the tensors alive."""
        cos, sin = rotation
        blocks = self._blocks
        return LayerPass(
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=slots.data_ptr(),
            pages=blocks.pages.ctypes.data,
            blocks=blocks.edges.ctypes.data,
            scratch=scratch.data_ptr(),
            rows=len(cos),
            block_count=len(blocks.edges),
            max_rows=blocks.max_rows,
            longest=blocks.longest,
            page_size=kv.page_size,
            page_count=kv.value_pages,
            quantized=kv.quantized,
        )

    def attend(self, layer: LayerKv, query: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        missing = layer.head_dim - query.shape[-1]
        query = query.contiguous() if missing == 0 else torch.nn.functional.pad(query, (0, missing))
        return self._kernels.attend(query, layer, self._blocks, rule)[..., : layer.head_dim - missing]


class KernelBackend:
    """Gives a row the same bits whatever shares its pass: each query head's sums have one order."""

    def __init__(self, kernels: CpuKernels, page_size: int) -> None:
        self._kernels = kernels
        self._page_size = page_size

    def plan(self, spans: Sequence[Span], batched_tokens: int) -> KernelPlan:
        edges, pages = cut_into_blocks(spans, self._page_size, _BLOCK_ROWS)
        max_rows = max(rows for _, rows, _, _ in edges)
        longest = max(span.start + span.rows for span in spans)
        blocks = AttentionBlocks(np.array(edges, np.int64), np.array(pages, np.int64), max_rows, longest)
        return KernelPlan(self._kernels, blocks)
