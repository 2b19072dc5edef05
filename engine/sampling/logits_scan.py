"""What whole rows of logits are scanned for: the argmax, the probability of one token, a digest, and what a grammar
forbids.

`LogitsScan` computes it with torch, on any device; engine/cpu/logits_scan.py and engine/cuda/triton_sampling.py have
kernels for it, which give the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from engine.sampling.noise import noise_bits

RACE_MARGIN = 24.0
"""Above the largest -log(1 - t) / t that 32 bits of noise give (22.874), by far more than float32 errs."""

Draw = tuple[int, float]
"""How a row's token is drawn: the key of its noise, and the temperature. At 0 the largest score wins."""

_BUCKET = 128
# For each byte, of the eight tokens whose bits it has, the lowest first: how large their logits may be.
_BOUNDS = torch.tensor([[math.inf if byte >> bit & 1 else -math.inf for bit in range(8)] for byte in range(256)])


@lru_cache(maxsize=8)
def _digest_weights(count: int, device: torch.device) -> Tensor:
    return noise_bits(torch.zeros(1, dtype=torch.int64, device=device), torch.arange(count, device=device)) | 1


class LogitsScan:
    draws = False
    """Whether `choose` takes temperatures above 0."""

    def argmax(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Column (int64) and value (float32) of the first largest score of each row [R, V]; a row with NaN has the
        value NaN.

        Searches for the bucket first: on a CPU, maxima without their columns are many times faster."""
        vocabulary_size = scores.shape[1]
        whole = vocabulary_size // _BUCKET
        if whole == 0:
            return scores.argmax(1), scores.amax(1).to(torch.float32)
        maxima = scores[:, : whole * _BUCKET].unflatten(1, (whole, _BUCKET)).amax(2)
        if vocabulary_size % _BUCKET:
            maxima = torch.cat([maxima, scores[:, whole * _BUCKET :].amax(1, keepdim=True)], 1)
        # The last bucket is moved left to be whole. Columns that it then shares hold no maximum, or the bucket before
        # would have been found.
        start = (maxima.argmax(1, keepdim=True) * _BUCKET).clamp(max=vocabulary_size - _BUCKET)
        lanes = start + torch.arange(_BUCKET, device=scores.device)
        return start[:, 0] + scores.gather(1, lanes).argmax(1), maxima.amax(1).to(torch.float32)

    def probabilities(self, scores: Tensor, columns: Tensor) -> Tensor:
        """Softmax of each row [R, V] at the row's column (int64), float32; NaN for a row that has none."""
        scores = scores.to(torch.float32)
        return torch.exp(scores.gather(1, columns[:, None])[:, 0] - torch.logsumexp(scores, 1))

    def choose(self, scores: Tensor, draws: Sequence[Draw], token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The token that `sample_tokens` gives each row [R, V] without filters or changes of its scores (int64,
        negative in place of None), and its softmax probability (float32), on the device of the scores, without waiting
        for it. `token_ids` as there."""
        columns, largest = self.argmax(scores)
        tokens = columns if token_ids is None else token_ids[columns]
        return torch.where(largest.isfinite(), tokens, -1), self.probabilities(scores, columns)

    @torch.inference_mode()
    def digests(self, scores: Tensor) -> list[int]:
        """Of each row [R, V] a number between 1 and 2^64 - 1 that tells its bits from others'.

        It is the sum modulo 2^64 of each score's bits, as an unsigned number, times an odd number of the column's own
        (1 in place of 0). So it is the same in any order of the sum, and another one where a single bit is another one.
        """
        weights = _digest_weights(scores.shape[1], scores.device)
        return [digest % 2**64 or 1 for digest in self._weighted_bits(scores, weights).tolist()]

    def _weighted_bits(self, scores: Tensor, weights: Tensor) -> Tensor:
        bits = scores.view({2: torch.int16, 4: torch.int32}[scores.element_size()])
        unsigned = 2 ** (8 * scores.element_size()) - 1
        # A few rows at a time, whose products fit a CPU's cache.
        return torch.cat([((rows.to(torch.int64) & unsigned) * weights).sum(1) for rows in bits.split(4)])

    @torch.inference_mode()
    def forbid(
        self, scores: Tensor, rows: Sequence[int], allowed: NDArray[np.uint8], token_ids: Tensor | None = None
    ) -> None:
        """Puts -inf in place of what some `rows` of scores [R, V] have for other tokens than the `allowed` ones, of
        which there is a bit for each token and row: [rows, bytes], the lowest bit first.

        `token_ids` [V], int64 and ascending, names the tokens of the columns; without it a column's number is its
        token's id.
        """
        bytes_ = torch.from_numpy(allowed).to(scores.device).to(torch.int64)
        # The smaller of a score and its bound: on a CPU several times as fast as a fill by booleans.
        bounds = embedding(bytes_, _BOUNDS.to(scores)).view(len(rows), -1)
        bounds = bounds[:, : scores.shape[1]] if token_ids is None else bounds[:, token_ids]
        if len(rows) == scores.shape[0]:
            torch.minimum(scores, bounds, out=scores)
        else:
            index = torch.tensor(rows, device=scores.device)
            scores[index] = torch.minimum(scores[index], bounds)
