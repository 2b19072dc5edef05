"""What is read off whole rows of logits: where each is largest, and how likely one of its tokens is."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cpu_kernels import CpuKernels

_BUCKET = 128


class LogitsScan:
    """By Spool's kernels where they are there and take the rows, else by torch: both give the same places."""

    def __init__(self, kernels: CpuKernels | None = None) -> None:
        self._kernels = kernels

    def first_largest(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Column (int64) and value (float32) of the first largest score of each row [R, V]; a row with NaN has the
        value NaN."""
        if self._kernels is not None and self._kernels.scans(scores):
            return self._kernels.first_largest(scores)
        return _first_largest(scores)

    def probabilities(self, scores: Tensor, columns: Tensor) -> Tensor:
        """Softmax of each row [R, V] at the row's column (int64), float32; NaN for a row that has none."""
        if self._kernels is not None and self._kernels.scans(scores):
            return self._kernels.probabilities(scores, columns)
        scores = scores.to(torch.float32)
        return torch.exp(scores.gather(1, columns[:, None])[:, 0] - torch.logsumexp(scores, 1))


def _first_largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Looks for the bucket first: maxima without their place are many times faster on a CPU."""
    vocabulary_size = scores.shape[1]
    whole = vocabulary_size // _BUCKET
    if whole == 0:
        return scores.argmax(1), scores.amax(1).to(torch.float32)
    maxima = scores[:, : whole * _BUCKET].unflatten(1, (whole, _BUCKET)).amax(2)
    if vocabulary_size % _BUCKET:
        maxima = torch.cat([maxima, scores[:, whole * _BUCKET :].amax(1, keepdim=True)], 1)
    # The last bucket is moved left to be whole: had a maximum been in what it now shares, the one before would lead.
    start = (maxima.argmax(1, keepdim=True) * _BUCKET).clamp(max=vocabulary_size - _BUCKET)
    lanes = start + torch.arange(_BUCKET, device=scores.device)
    return start[:, 0] + scores.gather(1, lanes).argmax(1), maxima.amax(1).to(torch.float32)
