"""Scans of whole rows of logits: the argmax of each, and the probability of one of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cpu.kernels import CpuKernels

_BUCKET = 128


class LogitsScan:
    """By Spool's kernels if there are any and they take the rows, otherwise by torch; both give the same columns."""

    def __init__(self, kernels: CpuKernels | None = None) -> None:
        self._kernels = kernels

    def argmax(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Column (int64) and value (float32) of the first largest score of each row [R, V]; a row with NaN has the
        value NaN."""
        if self._kernels is not None and self._kernels.scans(scores):
            return self._kernels.argmax(scores)
        return _argmax(scores)

    def probabilities(self, scores: Tensor, columns: Tensor) -> Tensor:
        """Softmax of each row [R, V] at the row's column (int64), float32; NaN for a row that has none."""
        if self._kernels is not None and self._kernels.scans(scores):
            return self._kernels.probabilities(scores, columns)
        scores = scores.to(torch.float32)
        return torch.exp(scores.gather(1, columns[:, None])[:, 0] - torch.logsumexp(scores, 1))


def _argmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Searches for the bucket first: on a CPU, maxima without their columns are many times faster."""
    vocabulary_size = scores.shape[1]
    whole = vocabulary_size // _BUCKET
    if whole == 0:
        return scores.argmax(1), scores.amax(1).to(torch.float32)
    maxima = scores[:, : whole * _BUCKET].unflatten(1, (whole, _BUCKET)).amax(2)
    if vocabulary_size % _BUCKET:
        maxima = torch.cat([maxima, scores[:, whole * _BUCKET :].amax(1, keepdim=True)], 1)
    # The last bucket is moved left to be whole. Columns that it then shares hold no maximum, or the bucket before would
    # have been found.
    start = (maxima.argmax(1, keepdim=True) * _BUCKET).clamp(max=vocabulary_size - _BUCKET)
    lanes = start + torch.arange(_BUCKET, device=scores.device)
    return start[:, 0] + scores.gather(1, lanes).argmax(1), maxima.amax(1).to(torch.float32)
