"""Scans of logits by the CPU kernels, where these take the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spool.engine.cpu.kernels import CpuKernels
from spool.engine.sampling.context import Draw
from spool.engine.sampling.logits_scan import LogitsScan


class KernelScan(LogitsScan):
    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def argmax(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernels.argmax(scores) if self._kernels.scans(scores) else super().argmax(scores)

    def draw(self, scores: Tensor, draws: Sequence[Draw], token_ids: Tensor | None = None) -> Tensor | None:
        if not self._kernels.scans(scores):
            return None
        return self._kernels.draw(scores, [(draw.key, draw.temperature) for draw in draws], token_ids)

    def digests(self, scores: Tensor, rows: Sequence[int]) -> Tensor:
        return self._kernels.digests(scores, rows) if self._kernels.scans(scores) else super().digests(scores, rows)

    def masses(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernels.masses(scores) if self._kernels.scans(scores) else super().masses(scores)

    def forbid(
        self, scores: Tensor, rows: Sequence[int], allowed: NDArray[np.uint8], token_ids: Tensor | None = None
    ) -> None:
        if self._kernels.scans(scores):
            self._kernels.forbid(scores, rows, allowed, token_ids)
        else:
            super().forbid(scores, rows, allowed, token_ids)
