"""Tokens that Triton kernels choose are those of the sampler, interpreted on a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cuda.setup import GpuPasses
from engine.models.kernels import logits_scan
from engine.models.loaded_model import LoadedModel
from engine.models.vocabulary import Vocabulary
from engine.sampling.logits_scan import LogitsScan
from engine.sampling.sampler import SamplingContext, sample_tokens
from scheduler.sampling import SamplingParameters
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, tiny_model
from tests.support.triton_kernel import interpreted

TEMPERATURES = (0.0, 0.2, 0.7, 1.0, 1.8, 1e-300, 50.0)


@pytest.fixture(scope="module")
def scan() -> LogitsScan:
    return interpreted("engine.cuda.triton_sampling").TritonScan()


def row(number: int, temperature: float, changes: dict[str, Any] | None = None) -> SamplingContext:
    sampling = SamplingParameters(temperature=temperature, seed=number * 7919 + 2**40)
    return SamplingContext(replace(sampling, **changes or {}), 17 * number, range(20), 10)


def random_logits(rows: int, size: int, dtype: torch.dtype, spread: float, seed: int = 0) -> Tensor:
    """A view of wider rows, as a model with padding gives."""
    wide = torch.randn(rows, size + 40, generator=torch.Generator().manual_seed(seed)) * spread
    wide[:, size:] = 1e4
    return wide.to(dtype)[:, :size]


@pytest.mark.parametrize("size", [1, 1025, 3000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_greedy_is_the_first_largest(scan: LogitsScan, size: int, dtype: torch.dtype) -> None:
    """On a grid, on which ties are the rule, in one chunk and between two; with the probability of the softmax."""
    logits = random_logits(5, size, torch.float32, 1.5).round().to(dtype)
    tokens, probabilities = scan.choose(logits, [(0, 0.0)] * 5)
    assert tokens.tolist() == [line.index(max(line)) for line in logits.tolist()]
    expected = torch.softmax(logits.double(), 1).amax(1)
    assert torch.allclose(probabilities.double(), expected, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_are_not_finite_have_no_token(scan: LogitsScan, temperature: float) -> None:
    logits = random_logits(8, 3000, torch.float32, 2.0)
    for line, value, columns in (
        (0, math.nan, slice(2500, 2501)),
        (1, math.inf, slice(0, 1)),
        (2, -math.inf, slice(None)),
        (3, -math.inf, slice(5, None)),
        (4, math.nan, slice(None)),
        (5, -math.inf, slice(0, 2048)),
        (6, math.inf, slice(None)),
    ):
        logits[line, columns] = value
    rows = [row(number, temperature) for number in range(8)]
    expected = sample_tokens(logits, rows)
    assert sample_tokens(logits, rows, scan=scan) == expected
    assert [number for number, token in enumerate(expected) if token is None] == [0, 1, 2, 4, 6]


@pytest.mark.parametrize(("spread", "dtype"), [(0.0, torch.float32), (3.0, torch.bfloat16), (12.0, torch.float32)])
def test_drawn_tokens_are_the_samplers(scan: LogitsScan, spread: float, dtype: torch.dtype) -> None:
    """Many seeds and positions at each temperature, on logits from equal to far apart, some of them -inf."""
    rows = [row(number, temperature) for number in range(2) for temperature in TEMPERATURES]
    logits = random_logits(len(rows), 2100, dtype, spread)
    logits[::3, ::2] = -math.inf
    found = sample_tokens(logits, rows, scan=scan)
    assert found == sample_tokens(logits, rows)
    tokens, probabilities = scan.choose(logits[:9], [(number, 0.7) for number in range(9)])
    expected = torch.softmax(logits[:9].double(), 1).gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(probabilities.double(), expected, rtol=1e-4, atol=1e-30)


def test_drawn_tokens_of_a_head_over_some_tokens(scan: LogitsScan) -> None:
    token_ids = torch.randperm(150_000, generator=torch.Generator().manual_seed(1))[:1100].sort().values
    rows = [row(number, temperature) for number in range(3) for temperature in TEMPERATURES]
    logits = random_logits(len(rows), 1100, torch.float16, 1.0).round()
    found = sample_tokens(logits, rows, token_ids=token_ids, scan=scan)
    assert found == sample_tokens(logits, rows, token_ids=token_ids)


def test_rows_of_all_kinds_in_one_batch(scan: LogitsScan) -> None:
    """Those that the kernels do not take keep their place."""
    kinds: Sequence[tuple[float, dict[str, Any]]] = [
        (0.0, {}),
        (0.9, {}),
        (0.0, {"repetition_penalty": 1.8}),
        (0.9, {"top_p": 0.8}),
        (0.0, {"top_k": 3}),
        (0.9, {"logit_bias": {4: 9.0}, "min_p": 0.01}),
        (0.9, {"frequency_penalty": 0.5}),
    ]
    rows = [row(number, *kinds[number % len(kinds)]) for number in range(21)]
    logits = random_logits(21, 1500, torch.bfloat16, 2.0)
    logits[10:14, 3] = math.nan
    expected = sample_tokens(logits, rows)
    assert sample_tokens(logits, rows, scan=scan) == expected
    for kind in range(len(kinds)):
        some = slice(kind, None, len(kinds))
        assert sample_tokens(logits[some], rows[some], scan=scan) == expected[some]


@pytest.mark.parametrize("fault", ["", "other tokens", "does not compile"])
def test_kernels_are_used_where_they_choose_what_torch_chooses(
    fault: str, scan: LogitsScan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def choose(_: object, scores: Tensor, *given: object) -> tuple[Tensor, Tensor]:
        if fault == "does not compile":
            raise RuntimeError(fault)
        return torch.zeros(len(scores), dtype=torch.int64), torch.ones(len(scores))

    def backend(_: int) -> Any:
        raise NotImplementedError

    if fault:
        monkeypatch.setattr(type(scan), "choose", choose)
    model = tiny_model("llama", **TORCH_SHAPE)
    loaded = LoadedModel(model, Vocabulary(b"", VOCABULARY), None, GpuPasses("", backend, None))
    for token_ids in (None, torch.arange(0, VOCABULARY, 2)):
        assert logits_scan(loaded, token_ids).draws == (not fault)
    assert len(caplog.messages) == (2 if fault else 0)
