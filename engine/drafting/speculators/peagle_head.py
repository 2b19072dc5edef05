"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that proposes all tokens in one pass.

Behind the pair that it knows, rows have the token and the features of a mask, which were learnt; each sees those before
it.
"""

from __future__ import annotations

import torch

from spool.engine.drafting.eagle_head import EagleHead
from spool.engine.drafting.head import HeadWeights
from spool.engine.drafting.speculators.blocks import Block
from spool.engine.drafting.speculators.config import DrafterConfig


class PeagleHead(EagleHead):
    at_once = True

    def block(self, sampled: int, length: int) -> Block:
        return Block([sampled, *[self._mask] * (length - 1)], range(length))

    @torch.no_grad()
    def _take(self, weights: HeadWeights, read: DrafterConfig, rows: int) -> None:
        super()._take(weights, read, rows)
        self._mask = int(read.fields["mask_token_id"])
        mask = weights.tensor("mask_hidden", 1, 1, len(self.layers) * self.hidden_size)
        self.mask_features = self.features(mask.view(1, -1))[0]
