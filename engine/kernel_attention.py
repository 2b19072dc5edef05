"""Attention over paged KV by a kernel that reads the pages where they lie: no gather, no mask, no padded length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.attention import Span
from engine.cpu_kernels import LANES, AttentionBlocks, CpuKernels
from engine.paged_kv import LayerKv

# Rows of a sequence that share the unpacking of a page; more of them leave less to share out among threads.
_BLOCK_ROWS = 8


class KernelPlan:
    def __init__(self, kernels: CpuKernels, blocks: AttentionBlocks) -> None:
        self._kernels = kernels
        self._blocks = blocks

    def attend(self, layer: LayerKv, query: torch.Tensor, scaling: float) -> torch.Tensor:
        return self._kernels.attend(query.contiguous(), layer.pool, self._blocks, scaling)


class KernelBackend:
    """Gives a row the same bits whatever shares its pass: each query head's sums have one order."""

    def __init__(self, kernels: CpuKernels, page_size: int) -> None:
        self._kernels = kernels
        self._page_size = page_size

    @staticmethod
    def supports(dtype: torch.dtype, device: torch.device, head_dim: int, page_size: int) -> bool:
        on_cpu = device.type == "cpu" and dtype == torch.bfloat16
        return on_cpu and head_dim % (2 * LANES) == 0 and page_size % LANES == 0

    def plan(self, spans: Sequence[Span], packed_rows: int) -> KernelPlan:
        pages: list[int] = []
        edges: list[tuple[int, int, int, int]] = []
        for span in spans:
            edges.extend(
                (span.first_row + done, min(_BLOCK_ROWS, span.rows - done), span.start + done, len(pages))
                for done in range(0, span.rows, _BLOCK_ROWS)
            )
            pages.extend(span.pages[: -(-(span.start + span.rows) // self._page_size)])
        most_rows = max(rows for _, rows, _, _ in edges)
        longest = max(span.start + span.rows for span in spans)
        blocks = AttentionBlocks(np.array(edges, np.int64), np.array(pages, np.int64), most_rows, longest)
        return KernelPlan(self._kernels, blocks)
