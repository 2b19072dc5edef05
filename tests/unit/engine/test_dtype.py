"""Which dtype `auto` takes."""

from __future__ import annotations

import pytest
import torch

from spool.engine.models.dtype import COMPUTED, best_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", COMPUTED, ids=str)
def test_it_is_the_checkpoints_own(dtype: torch.dtype) -> None:
    assert best_dtype(dtype, CPU) == (dtype, "the checkpoint's own")


def test_a_checkpoint_that_no_engine_computes_in_is_converted() -> None:
    assert best_dtype(torch.float64, CPU) == (torch.float32, "the checkpoint has float64")
