"""Which dtype `auto` takes."""

from __future__ import annotations

import pytest
import torch

from spool.engine.cpu.linear import can_prepack
from spool.engine.models.dtype import COMPUTED, best_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", COMPUTED, ids=str)
def test_with_kernels_it_is_the_checkpoints_own(dtype: torch.dtype) -> None:
    assert best_dtype(dtype, CPU, has_kernels=True) == (dtype, "the checkpoint's own")


def test_without_kernels_it_is_what_torch_computes_fast() -> None:
    assert best_dtype(torch.float32, CPU, has_kernels=False)[0] == torch.float32
    assert best_dtype(torch.float16, CPU, has_kernels=False) == (
        torch.float32,
        "without CPU kernels, float16 takes longer here",
    )
    by_onednn = can_prepack(torch.empty(0, dtype=torch.bfloat16))
    assert best_dtype(torch.bfloat16, CPU, has_kernels=False)[0] == (torch.bfloat16 if by_onednn else torch.float32)


def test_a_checkpoint_that_no_engine_computes_in_is_converted() -> None:
    assert best_dtype(torch.float64, CPU, has_kernels=False) == (torch.float32, "the checkpoint has float64")
