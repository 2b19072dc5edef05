"""What whole rows of logits are scanned for: the argmax, a drawn token, a digest, and what a grammar forbids.

`LogitsScan` computes it with torch, on any device; engine/cpu/logits_scan.py and engine/cuda/triton_sampling.py have
kernels for it, which give the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding, pad

from spool.engine import ieee_math
from spool.engine.passes.device import on_device
from spool.engine.sampling.context import Draw, SamplingContext
from spool.engine.sampling.logits_shaping import WEIGHT_BITS, in_order, weights
from spool.engine.sampling.noise import noise_bits

RACE_MARGIN = 24.0
"""Above the largest -log(1 - t) / t that 32 bits of noise give (22.874), by far more than float32 errs."""


_BUCKET = 128
# At a time, whose numbers fit a CPU's cache.
_ROWS = 4
# For each byte, of the eight tokens whose bits it has, the lowest first: how large their logits may be.
_BOUNDS = torch.tensor([[math.inf if byte >> bit & 1 else -math.inf for bit in range(8)] for byte in range(256)])


class LogitsScan:
    beside_host = False
    """Whether `sample` takes all rows, and the host goes on while this computes: it is to ask for all that it wants
    before it waits for some."""

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

    def draw(self, scores: Tensor, draws: Sequence[Draw], token_ids: Tensor | None = None) -> Tensor | None:
        """The token that `sample_tokens` gives each row [R, V] without filters whose scores nothing changes (int64,
        negative in place of None), on the device of the scores, without waiting for it; None where these scores are not
        drawn from here. `token_ids` as there."""
        return None

    def sample(self, logits: Tensor, rows: Sequence[SamplingContext], token_ids: Tensor | None = None) -> Tensor | None:
        """All that `sample_tokens` does for the rows, as `draw` gives it; None where it is not done here."""
        return None

    @torch.inference_mode()
    def digests(self, scores: Tensor, rows: Sequence[int]) -> Tensor:
        """Of some `rows` of scores [R, V], in their order, what tells their bits from others' (int64 `[rows]`), on the
        device of the scores, without waiting for it.

        A row's is the sum modulo 2^64 of its words of 8 bytes, zeros filling the last, each replaced by the noise for
        the word as key and its place, and this by the noise for that as key. Other keys have other noise, so a change
        within one word always changes the sum. (Mixed once, the signs of two scores would cancel out once in 2^40.)
        Rows that differ in several words have one sum by chance, about once in 2^64; whoever looks for such rows finds
        some.
        """
        device, whole = scores.device, list(rows) == list(range(len(scores)))
        bytes_ = (scores if whole else scores[on_device(rows, device)]).view(torch.uint8)
        words = pad(bytes_, (0, -bytes_.shape[1] % 8)).contiguous().view(torch.int64)
        places = torch.arange(words.shape[1], device=device)
        parts = words.split(_ROWS if device.type == "cpu" else 64)
        return torch.cat([noise_bits(noise_bits(part, places), places).sum(1) for part in parts])

    def logprobs(self, logits: Tensor, rows: Sequence[int], tokens: Tensor, count: int) -> Tensor:
        """Of some `rows` of logits [R, V] and a token of each, on the device of the logits, without waiting for it
        (int64): the log probability of the token, the ids of the `count` likeliest ones, or of all, and their log
        probabilities, rounded to float32. These are float64, as bits.

        Nothing depends on the batch: sums are exact, and all else is computed number by number.
        """
        found = []
        for some, own in zip(on_device(rows, logits.device).split(_ROWS), tokens.split(_ROWS), strict=True):
            scores = logits[some]
            largest, mass = self.masses(scores)
            columns = own[:, None]
            if count:
                deficit = largest[:, None] - scores.to(torch.float32) + 0.0
                columns = torch.cat([columns, in_order(deficit, min(count, scores.shape[1]))], 1)
            deficit = (largest[:, None] - scores.gather(1, columns).to(torch.float32)).to(torch.float64)
            logprobs = (-deficit - ieee_math.log(mass)[:, None]).to(torch.float32)
            bits = logprobs.to(torch.float64).view(torch.int64)
            found.append(torch.cat([bits[:, :1], columns[:, 1:], bits[:, 1:]], 1))
        return torch.cat(found)

    def masses(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row [R, V] the largest score, float32 [R], and all probabilities together where its own is 1, float64
        [R]; NaN where a row is not finite."""
        largest = scores.amax(1).to(torch.float32)
        mass = weights(largest[:, None] - scores).sum(1).to(torch.float64) * 2.0**-WEIGHT_BITS
        return largest, torch.where(largest.isfinite(), mass, torch.nan)

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
