"""Experts by kernels of a CPU and, in Triton's interpreter, of a GPU: what transformers computes, and the same bits for
a row whatever the other rows are and choose."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from spool.engine.cpu.experts import replace_experts
from tests.support.cpu_kernels import compiled_kernels
from tests.support.tiny_models import tiny_model
from tests.support.triton_kernel import interpreted, multiply_in_one_order

EXPERTS, CHOSEN, ROWS = 6, 3, 40
FAMILIES = {
    "mixtral": torch.bfloat16,  # the usual gate
    "qwen2_moe": torch.float16,  # one expert for all rows beside the others
    "glm4_moe": torch.float16,  # routing in float32
    "minimax_m3_vl_text": torch.float16,  # a gate of its own
    "gpt_oss": torch.bfloat16,  # a gate of its own, biases and transposed weights
}
Replace = Callable[[nn.Module], None]


@pytest.fixture(params=["cpu", "gpu"])
def replace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Replace:
    if request.param == "cpu":
        return lambda block: replace_experts(block, compiled_kernels(block.experts.down_proj.dtype))
    module = interpreted("spool.engine.cuda.triton_experts")
    multiply_in_one_order(monkeypatch)
    replace_all: Replace = module.replace_experts
    return replace_all


def sparse_block(family: str, dtype: torch.dtype) -> nn.Module:
    model = tiny_model(family, num_experts_per_tok=CHOSEN)
    return next(module for module in model.modules() if hasattr(module, "experts")).to(dtype)


def given_rows(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, the experts that each chooses, and their shares. All choose expert 2, and none the last."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(ROWS, 64, generator=generator).to(dtype)
    others = torch.tensor([0, 1, 3, 4])[torch.rand(ROWS, 4, generator=generator).argsort(1)[:, : CHOSEN - 1]]
    chosen = torch.cat((others, torch.full((ROWS, 1), 2)), dim=1)
    chosen[::2] = chosen[::2].flip(1)
    return rows, chosen, torch.rand(ROWS, CHOSEN, generator=generator)


@pytest.mark.parametrize(("family", "dtype"), FAMILIES.items())
@torch.inference_mode()
def test_rows_get_what_transformers_gives_them_and_the_same_bits_in_any_company(
    replace: Replace, family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    block = sparse_block(family, dtype)
    plain = copy.deepcopy(block.experts).float()
    rows, chosen, shares = given_rows(dtype)
    counts = chosen.flatten().bincount(minlength=EXPERTS).tolist()
    assert (counts[2], counts[-1]) == (ROWS, 0)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        replace(block)
    assert not caplog.text
    assert type(block.experts) is not type(plain)
    found = block.experts(rows, chosen, shares)
    expected = plain(rows.float(), chosen, shares)
    assert found.dtype == dtype
    assert (found.float() - expected).abs().max() < {torch.float16: 0.004, torch.bfloat16: 0.03}[dtype] * expected.max()
    for some in ([0], [39], range(17), [5, 3, 38, 1]):
        at = torch.tensor(some)
        assert torch.equal(block.experts(rows[at], chosen[at], shares[at]), found[at])


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_routes_are_those_of_transformers_and_the_same_in_any_company(replace: Replace, family: str) -> None:
    block = sparse_block(family, torch.float16)
    name = "gate" if hasattr(block, "gate") else "router"
    plain = copy.deepcopy(getattr(block, name))
    rows, _, _ = given_rows(torch.float16)
    replace(block)
    router = getattr(block, name)
    found, expected = router(rows), plain(rows)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=0.01)
    alone = [router(row.unsqueeze(0)) for row in rows]
    for one, *others in zip(found, *alone, strict=True):
        assert torch.equal(torch.cat(others), one)
