"""Sums whose order depends on the number of rows, as those of torch on a GPU do: what calibration makes of them.

torch's reductions on CUDA give each row more threads where there are few rows (aten/src/ATen/native/cuda/Reduce.cuh).
So a mean over a hidden state of 1,024 and more has other bits below 16 rows. A stand-in does that on a CPU.
"""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from spool.engine.cpu.linear import replace_linears
from spool.engine.errors import ExactModeUnavailableError
from spool.engine.exactness.calibration import calibrate
from spool.engine.layers.plain_norms import replace_norms
from spool.engine.models.loaded_model import LoadedModel
from spool.engine.models.vocabulary import Vocabulary
from tests.support.cpu_kernels import compiled_kernels
from tests.support.tiny_models import VOCABULARY, tiny_model

MOST_ROWS = 40
HIDDEN = 1024


def mean_of_cuda(rows: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
    """Of each row, summed in 8 parts where there are fewer than 16 rows, and in 2 where there are more."""
    assert dim == -1
    parts = 8 if rows.numel() // rows.shape[-1] < 16 else 2
    total = torch.zeros(rows.shape[:-1])
    for part in rows.chunk(parts, dim=-1):
        total = total + part.sum(-1)
    found = total / rows.shape[-1]
    return found.unsqueeze(-1) if keepdim else found


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    monkeypatch.setattr(torch.Tensor, "mean", mean_of_cuda)
    return tiny_model("llama", hidden_size=HIDDEN, num_hidden_layers=1)


def accepted(model: PreTrainedModel) -> tuple[int, ...]:
    """Row counts of exact mode; linear layers and attention are computed by kernels, in one order."""
    loaded = LoadedModel(model, Vocabulary(b"", VOCABULARY), compiled_kernels(torch.float32), None)
    return calibrate(model, loaded.runner, 16, MOST_ROWS).row_counts


def test_replaced_norms_give_a_row_the_same_bits_at_every_row_count(model: PreTrainedModel) -> None:
    rows = torch.randn(MOST_ROWS, HIDDEN, generator=torch.Generator().manual_seed(0))

    def rows_with_the_bits_that_they_have_alone(count: int) -> int:
        normed = model.base_model.norm(rows[:count])
        return sum(torch.equal(model.base_model.norm(rows[row : row + 1])[0], normed[row]) for row in range(count))

    assert rows_with_the_bits_that_they_have_alone(MOST_ROWS) < MOST_ROWS
    replace_norms(model)
    assert isinstance(model.base_model.norm, torch.nn.RMSNorm)
    assert all(rows_with_the_bits_that_they_have_alone(count) == count for count in (2, 15, 16, MOST_ROWS))


def test_the_models_own_norm_is_not(model: PreTrainedModel) -> None:
    replace_linears(model, compiled_kernels(torch.float32))
    with pytest.raises(ExactModeUnavailableError, match="differs from plain decoding"):
        accepted(model)
