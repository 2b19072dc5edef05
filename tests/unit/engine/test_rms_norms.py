"""The norms that torch's fused one takes the place of, whatever the family."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.models.joined_layers import FusedRmsNorm, is_plain_rms_norm

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_norms_are_computed_by_the_fused_one(dtype: torch.dtype) -> None:
    norm = norm_of(LlamaRMSNorm, dtype)
    assert is_plain_rms_norm(norm)
    rows = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = rows.double() / torch.sqrt(rows.double().pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight.double()
    fused = FusedRmsNorm(norm)(rows)
    assert fused.dtype == dtype
    assert torch.allclose(fused.double(), exact, rtol=torch.finfo(dtype).eps * 2, atol=1e-6)


@pytest.mark.parametrize("kind", [GemmaRMSNorm, GatedRMSNorm, LargerEpsilonRMSNorm, nn.LayerNorm])
def test_norms_that_compute_something_else_are_not_plain(kind: type[nn.Module]) -> None:
    assert not is_plain_rms_norm(norm_of(kind))
