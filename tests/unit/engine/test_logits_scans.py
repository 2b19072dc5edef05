"""Scans of logits by the kernels of a CPU and, in Triton's interpreter, of a GPU: what plain Python and the sampler
find."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spool.engine.cpu.logits_scan import KernelScan
from spool.engine.sampling.context import SamplingContext
from spool.engine.sampling.logits_scan import LogitsScan
from spool.engine.sampling.sampler import sample_tokens
from spool.scheduler.sampling import SamplingParameters
from tests.support.cpu_kernels import ISAS, compiled_kernels
from tests.support.triton_kernel import interpreted

GPU = "gpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCANS = [(ISAS[0], torch.bfloat16, 1), (ISAS[0], torch.bfloat16, 2), (GPU, torch.bfloat16, 1)]
MORE = [
    *((isa, dtype, threads) for isa, threads in ((ISAS[0], 2), (GPU, 1)) for dtype in DTYPES[1:]),
    *((isa, torch.bfloat16, threads) for isa in ISAS[1:] for threads in (1, 2)),
]
Place = tuple[str, torch.dtype, int]
"""Instruction set or GPU, dtype, and threads."""
# Some make one token certain, and some make all alike.
TEMPERATURES = (0.0, 1e-300, 1e-40, 0.2, 0.7, 1.0, 1.8, 100.0)


@pytest.fixture(
    scope="module", params=[*SCANS, *(pytest.param(more, marks=pytest.mark.slow) for more in MORE)], ids=str
)
def place(request: pytest.FixtureRequest) -> Place:
    chosen: Place = request.param
    return chosen


@pytest.fixture
def scan(place: Place) -> Iterator[LogitsScan]:
    isa, dtype, threads = place
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    if isa == GPU:
        yield interpreted("spool.engine.cuda.triton_sampling").TritonScan()
    else:
        yield KernelScan(compiled_kernels(dtype, isa))
    torch.set_num_threads(before)


def scores_like(place: Place, case: str, rows: int, size: int, spread: float = 1.0) -> Tensor:
    """A view of wider rows, as a model with padding gives."""
    wide = torch.randn(rows, size + 40, generator=torch.Generator().manual_seed(1)) * spread
    wide[:, size:] = 1e4
    scores = wide[:, :size]
    if case == "ties":
        scores.copy_((scores * 2).round())
    elif case == "negative":
        scores.copy_(-scores.abs() - 1)
    elif case == "excluded":
        scores[:, : size // 2 + 1] = -math.inf
    return wide.to(place[1])[:, :size]


def row(number: int, temperature: float, **changes: Any) -> SamplingContext:
    sampling = SamplingParameters(temperature=temperature, seed=number * 7919 + 2**40, **changes)
    return SamplingContext(sampling, 17 * number, range(20), 10)


@pytest.mark.parametrize("case", ["plain", "ties", "negative", "excluded"])
@pytest.mark.parametrize(("rows", "size"), [(1, 3), (5, 130), (5, 1025), (2, 49152)])
def test_the_first_largest_is_found(scan: LogitsScan, place: Place, case: str, rows: int, size: int) -> None:
    scores = scores_like(place, case, rows, size)
    found = sample_tokens(scores, [row(number, 0.0) for number in range(rows)], scan=scan)
    assert found == [line.index(max(line)) for line in scores.tolist()]


def test_both_zeros_are_one_score(scan: LogitsScan, place: Place) -> None:
    scores = torch.full((2, 100), -1.0, dtype=place[1])
    scores[:, 40], scores[:, 70] = torch.tensor([-0.0, 0.0]), torch.tensor([0.0, -0.0])
    assert sample_tokens(scores, [row(number, 0.0) for number in range(2)], scan=scan) == [40, 40]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_are_not_finite_have_no_token(scan: LogitsScan, place: Place, temperature: float) -> None:
    scores = scores_like(place, "plain", 10, 3000)
    for line, value, columns in (
        (0, math.nan, slice(2500, 2501)),
        (1, math.inf, slice(0, 1)),
        (2, -math.inf, slice(None)),
        (3, -math.inf, slice(5, None)),
        (4, math.nan, slice(None)),
        (5, -math.inf, slice(0, 2048)),
        (6, math.inf, slice(None)),
        (7, -math.nan, slice(0, 1)),
        (8, -math.nan, slice(2999, None)),
    ):
        scores[line, columns] = value
    rows = [row(number, temperature) for number in range(10)]
    expected = sample_tokens(scores, rows)
    assert sample_tokens(scores, rows, scan=scan) == expected
    assert [number for number, token in enumerate(expected) if token is None] == [0, 1, 2, 4, 6, 7, 8]


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("some_tokens", [False, True])
@pytest.mark.parametrize(
    ("case", "spread"), [("plain", 0.0), ("plain", 3.0), ("ties", 2.0), ("excluded", 8.0), ("plain", 12.0)]
)
@pytest.mark.parametrize("size", [1, 130, 2100])
def test_drawn_tokens_are_the_samplers(
    scan: LogitsScan, place: Place, case: str, spread: float, size: int, some_tokens: bool
) -> None:
    rows = [row(number, temperature) for number in range(2) for temperature in TEMPERATURES]
    scores = scores_like(place, case, len(rows), size, spread)
    token_ids = torch.randperm(3 * size, generator=torch.manual_seed(1))[:size].sort().values if some_tokens else None
    assert sample_tokens(scores, rows, token_ids, scan) == sample_tokens(scores, rows, token_ids)


def test_rows_of_all_kinds_in_one_batch(scan: LogitsScan, place: Place) -> None:
    """Those that the kernels do not take keep their place."""
    kinds: list[tuple[float, dict[str, Any]]] = [
        (0.0, {}),
        (0.9, {}),
        (0.0, {"repetition_penalty": 1.8}),
        (0.9, {"top_p": 0.8}),
        (0.0, {"top_k": 3}),
        (0.9, {"logit_bias": {4: 9.0}, "min_p": 0.01}),
        (0.9, {"frequency_penalty": 0.5}),
    ]
    rows = [row(number, temperature, **changes) for number, (temperature, changes) in enumerate(kinds * 3)]
    scores = scores_like(place, "plain", 21, 1500, 2.0)
    scores[10:14, 3] = math.nan
    expected = sample_tokens(scores, rows)
    assert sample_tokens(scores, rows, scan=scan) == expected
    if place[0] == GPU:
        in_parts = interpreted("spool.engine.cuda.triton_sampling").TritonScan(listed_at_once=4 * 1500)
        assert sample_tokens(scores, rows, scan=in_parts) == expected
    for kind in range(len(kinds)):
        some = slice(kind, None, len(kinds))
        assert sample_tokens(scores[some], rows[some], scan=scan) == expected[some]


@pytest.mark.parametrize("size", [1, 1499, 1500])
def test_rows_have_the_digests_that_torch_gives_them(scan: LogitsScan, place: Place, size: int) -> None:
    scores = scores_like(place, "plain", 6, size)
    assert scan.digests(scores, [4, 0, 5]).tolist() == LogitsScan().digests(scores, [4, 0, 5]).tolist()


@pytest.mark.parametrize("some_tokens", [False, True])
def test_only_what_is_forbidden_loses_its_score(scan: LogitsScan, place: Place, some_tokens: bool) -> None:
    scores = scores_like(place, "plain", 4, 1500)
    scores[3, 7] = math.nan
    token_ids = torch.arange(0, 4500, 3) if some_tokens else None
    allowed = torch.randint(256, (3, 563), dtype=torch.uint8, generator=torch.manual_seed(1)).numpy()
    bits = torch.from_numpy(np.unpackbits(allowed, axis=1, bitorder="little"))
    bits = bits[:, torch.arange(1500) if token_ids is None else token_ids]
    expected = scores.clone()
    for line, row_bits in zip((1, 3, 0), bits, strict=True):
        expected[line, (row_bits == 0) & ~expected[line].isnan()] = -math.inf
    scan.forbid(scores, [1, 3, 0], allowed, token_ids)
    assert torch.equal(scores.float().nan_to_num(1e9), expected.float().nan_to_num(1e9))


def test_log_probabilities_are_those_of_torch_and_have_the_same_bits_alone(scan: LogitsScan, place: Place) -> None:
    scores = scores_like(place, "ties", 6, 2100, 2.0)
    scores[4, 50:] = -math.inf
    scores[5, 3] = math.nan
    tokens = torch.tensor([5, 0, 2099, 7, 60, 1])
    found = scan.logprobs(scores, range(6), tokens, 4)
    assert torch.equal(found, torch.cat([scan.logprobs(scores, [i], tokens[i : i + 1], 4) for i in range(6)]))
    expected = LogitsScan().logprobs(scores, range(6), tokens, 4)
    assert torch.equal(found[:5, 1:5], expected[:5, 1:5])
    values, others = (numbers[:, [0, *range(5, 9)]].view(torch.float64) for numbers in (found, expected))
    torch.testing.assert_close(values, others, rtol=0, atol=1e-5, equal_nan=True)


def test_all_tokens_are_the_likeliest_of_a_small_vocabulary(scan: LogitsScan, place: Place) -> None:
    scores = scores_like(place, "ties", 2, 9, 2.0)
    found, expected = (one.logprobs(scores, [1, 0], torch.tensor([8, 3]), 20) for one in (scan, LogitsScan()))
    assert torch.equal(found[:, 1:10], expected[:, 1:10])
    assert found.shape == expected.shape
