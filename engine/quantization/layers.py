"""Linear layers and embeddings of quantised weights, as they are loaded: what computes them takes their place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from torch import nn

from spool.engine.quantization.weights import QuantizedWeight, joined_weights


class _Quantized(nn.Module):
    """Keeps the tensors of a weight as buffers, so that digests and moves see them."""

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        self._bits, self._group = weight.bits, weight.group
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("minimums", weight.minimums)

    @property
    def quantized(self) -> QuantizedWeight:
        return QuantizedWeight(self._bits, self._group, self.codes, self.scales, self.minimums)


class QuantizedLinear(_Quantized):
    """A linear layer that multiplies by the expanded weight, in float32."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight)
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(rows.float(), self.quantized.expanded(), bias).to(rows.dtype)


class QuantizedEmbedding(_Quantized):
    """`weight` has no rows: it says what dtype the embeddings have, and where they are. With a `scale`, rounded to
    that dtype, embeddings are the weight's rows times it, rounded once more."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__(weight)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.weight = nn.Parameter(torch.empty(0, self.embedding_dim, dtype=dtype), requires_grad=False)
        self.scale = scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.quantized.rows(tokens.flatten()).expanded().to(self.weight.dtype)
        return scaled(rows, self.scale).view(*tokens.shape, -1)


def scaled(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Embeddings, of rows of an embedding's weight: in their dtype, as transformers computes them."""
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)


def joined_quantized(layers: Sequence[QuantizedLinear]) -> QuantizedLinear:
    """One layer whose outputs are those of `layers`, one after the other. They have a bias all or none."""
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    return QuantizedLinear(joined_weights([layer.quantized for layer in layers]), bias)
