"""The norms that torch's fused one takes the place of, whatever the family."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.layers.joined_layers import is_plain_rms_norm

WIDTH = 64


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * gate


class LargerEpsilonRMSNorm(LlamaRMSNorm):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 10 * self.variance_epsilon)


def norm_of(kind: type[nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    norm = kind(WIDTH)
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.3, generator=torch.Generator().manual_seed(0))
    return norm.to(dtype)


@pytest.mark.parametrize("kind", [GemmaRMSNorm, GatedRMSNorm, LargerEpsilonRMSNorm, nn.LayerNorm])
def test_norms_that_compute_something_else_are_not_plain(kind: type[nn.Module]) -> None:
    assert not is_plain_rms_norm(norm_of(kind))
