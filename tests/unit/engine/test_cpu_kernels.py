"""The CPU kernels against the same mathematics in float64, and a row's bits in any company."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.attention.backends import AttentionRule, Span
from engine.cpu.attention import KernelBackend
from engine.cpu.kernels import CpuKernels
from engine.cpu.logits_scan import KernelScan
from engine.kv.paged_kv import LayerKv
from engine.sampling.logits_scan import LogitsScan
from engine.sampling.noise import GOLDEN, MULTIPLIER_1, MULTIPLIER_2
from engine.sampling.sampler import SamplingContext, sample_tokens
from scheduler.sampling import SamplingParameters
from tests.support.cpu_kernels import ISAS, compiled_kernels

PAGES = 64
ROUNDING = {torch.bfloat16: (0.1, 1.02 * 2.0**-8), torch.float16: (0.1, 1.02 * 2.0**-11), torch.float32: (0.8, 5e-6)}
"""By how much of itself a sum may differ from that in float64, if it is no smaller than this."""
# Smaller instruction sets run with all dtypes in tests/engine/test_kernel_program.py.
PARAMETERS = [
    (ISAS[0], torch.bfloat16),
    *(
        pytest.param(pair, marks=pytest.mark.slow)
        for pair in [(ISAS[0], torch.float16), (ISAS[0], torch.float32), *((isa, torch.bfloat16) for isa in ISAS[1:])]
    ),
]


@pytest.fixture(scope="module", params=PARAMETERS, ids=str)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    isa, dtype = request.param
    return compiled_kernels(dtype, isa)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rounded(kernels: CpuKernels, *shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(kernels.dtype)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (576, 100), (2, 4097)])
def test_a_linear_layer(kernels: CpuKernels, inputs: int, outputs: int, biased: bool) -> None:
    weight = rounded(kernels, outputs, inputs) / inputs**0.5
    bias = rounded(kernels, outputs, seed=2) if biased else None
    panels = kernels.to_panels(weight)
    bias_panels = None if bias is None else kernels.padded_bias(bias)
    rows = rounded(kernels, 70, inputs, seed=3)
    exact = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    exclusive = torch.cat([kernels.linear(rows[i : i + 1], panels, bias_panels, outputs) for i in range(len(rows))])
    # Rounded to the dtype, but for what float32 did on the way.
    floor, share = ROUNDING[kernels.dtype]
    assert ((exclusive.double() - exact).abs() <= exact.abs().clamp(min=floor) * share + 1e-6).all()
    for count in (*range(2, 20), *range(20, len(rows) + 1, 16), len(rows)):
        assert torch.equal(kernels.linear(rows[:count], panels, bias_panels, outputs), exclusive[:count])


class Pages:
    """A pool of random keys and values, and sequences on pages in no order."""

    def __init__(
        self,
        kernels: CpuKernels,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        quantized: bool = False,
    ) -> None:
        self.layer = LayerKv(PAGES, kv_heads, page_size, head_dim, kernels.dtype, torch.device("cpu"), quantized)
        self.layer.fill(rounded(kernels, 2, PAGES, kv_heads, page_size, head_dim))
        self.page_size = page_size
        self.query_heads = query_heads
        self.head_dim = head_dim
        self._rng = random.Random(3)

    def spans(self, places: list[tuple[int, int]]) -> list[Span]:
        """Of (start, rows)."""
        spans, first = [], 0
        for start, rows in places:
            pages = self._rng.sample(range(PAGES), -(-(start + rows) // self.page_size))
            spans.append(Span(first, rows, start, pages))
            first += rows
        return spans

    def exact(self, span: Span, queries: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """Attention of a span's rows `[rows, query_heads, head_dim]`, in float64."""
        keys, values = self.layer.content().double()[:, list(span.pages)].transpose(1, 2).flatten(2, 3)
        group = self.query_heads // keys.shape[0]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = torch.einsum("qhd,hkd->hqk", queries.double(), keys) * rule.scaling
        if rule.softcap:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        ages = torch.arange(span.start, span.start + span.rows)[:, None] - torch.arange(keys.shape[1])
        weights = scores.exp() * ((ages >= 0) & (ages < (rule.window or PAGES * self.page_size)))
        totals = weights.sum(-1, keepdim=True)
        if rule.sinks is not None:
            totals += rule.sinks[: self.query_heads].double().exp()[:, None, None]
        return torch.einsum("hqk,hkd->qhd", weights / totals, values)


SHAPES = [(4, 4, 32, 16), (9, 3, 64, 16), (8, 2, 96, 32), (16, 2, 128, 16), (5, 1, 160, 48)]
RULES = {
    "plain": AttentionRule(0.2),
    "window": AttentionRule(0.2, 23),
    "cap": AttentionRule(0.2, softcap=2.0),
    "all": AttentionRule(0.2, 64, 2.0, torch.arange(16) / 4),
}
PLACES = [(0, 1), (15, 1), (16, 1), (200, 5), (3, 40), (47, 2), (0, 17), (250, 1)]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("quantized", [False, True], ids=["elements", "codes"])
@pytest.mark.parametrize(
    ("shape", "rule"), [(SHAPES[1], rule) for rule in list(RULES)[:-1]] + [(shape, "all") for shape in SHAPES], ids=str
)
def test_attention_and_the_bits_of_each_row_alone(
    kernels: CpuKernels, shape: tuple[int, int, int, int], rule: str, quantized: bool
) -> None:
    pages = Pages(kernels, *shape, quantized)
    backend = KernelBackend(kernels, shape[3])
    spans = pages.spans(PLACES)
    rows = spans[-1].first_row + spans[-1].rows
    queries = rounded(kernels, rows + 3, shape[0], shape[2], seed=9)
    attended = backend.plan(spans, rows + 3).attend(pages.layer, queries, RULES[rule])
    assert not attended[rows:].any()
    torch.set_num_threads(1)
    for span in spans:
        part = slice(span.first_row, span.first_row + span.rows)
        error = (attended[part].double() - pages.exact(span, queries[part], RULES[rule])).abs()
        assert error.max() < 0.01
        for row in range(span.rows):
            alone = backend.plan([Span(0, 1, span.start + row, span.pages)], 1)
            place = slice(span.first_row + row, span.first_row + row + 1)
            assert torch.equal(alone.attend(pages.layer, queries[place], RULES[rule]), attended[place])


@pytest.mark.parametrize("quantized", [False, True], ids=["elements", "codes"])
@pytest.mark.parametrize(("start", "first_bad"), [(20, 24), (29, 31), (60, 63)])
def test_what_a_row_does_not_see_may_be_no_number(
    kernels: CpuKernels, start: int, first_bad: int, quantized: bool
) -> None:
    pages = Pages(kernels, 6, 2, 64, 16, quantized)
    (span,) = pages.spans([(start, 6)])
    backend = KernelBackend(kernels, 16)
    queries = rounded(kernels, 6, 6, 64, seed=9)
    before = backend.plan([span], 6).attend(pages.layer, queries, RULES["plain"])
    for position in range(first_bad, len(span.pages) * 16):
        pages.layer.parts[-1][:, span.pages[position // 16], :, position % 16] = torch.nan
    after = backend.plan([span], 6).attend(pages.layer, queries, RULES["plain"])
    unharmed = first_bad - start
    assert torch.equal(after[:unharmed], before[:unharmed])
    assert after[unharmed:].isnan().all()


def scores_like(kernels: CpuKernels, case: str, rows: int, size: int) -> torch.Tensor:
    """Rows of logits cut out of wider ones, as padded vocabularies are."""
    scores = rounded(kernels, rows, size + 9)[:, :size]
    if case == "ties":
        scores = (scores * 2).round()
    elif case == "negative":
        scores = -scores.abs() - 1
    elif case == "excluded":
        scores[:, : size // 2 + 1] = -torch.inf
    return scores


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("case", ["plain", "ties", "negative", "excluded"])
@pytest.mark.parametrize(("rows", "size"), [(1, 3), (5, 130), (4, 49152)])
def test_scan_of_logits(kernels: CpuKernels, case: str, rows: int, size: int) -> None:
    scores = scores_like(kernels, case, rows, size)
    places, values = kernels.argmax(scores)
    lists = scores.tolist()
    assert values.tolist() == [max(row) for row in lists]
    assert places.tolist() == [row.index(max(row)) for row in lists]
    wanted = torch.tensor([index % size for index in range(7, 7 + rows)])
    exact = torch.softmax(scores.double(), 1).gather(1, wanted[:, None])[:, 0]
    torch.testing.assert_close(kernels.probabilities(scores, wanted).double(), exact, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("place", [0, 999])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scan_sees_what_is_no_number(kernels: CpuKernels, place: int, sign: float) -> None:
    scores = rounded(kernels, 3, 1000)
    scores[1, place] = math.copysign(math.nan, sign)
    values = kernels.argmax(scores)[1].tolist()
    assert math.isnan(values[1])
    assert [values[0], values[2]] == [max(scores[0].tolist()), max(scores[2].tolist())]
    scores[1, place] = sign * torch.inf
    assert math.isinf(kernels.argmax(scores)[1].tolist()[1]) is (sign > 0)


def test_scan_takes_both_zeros_for_one(kernels: CpuKernels) -> None:
    scores = torch.full((2, 100), -1.0, dtype=kernels.dtype)
    scores[0, 40], scores[0, 70] = -0.0, 0.0
    scores[1, 40], scores[1, 70] = 0.0, -0.0
    assert kernels.argmax(scores)[0].tolist() == [40, 40]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("rows", "size"), [(1, 3), (5, 130), (4, 49152)])
def test_digests_are_those_of_plain_python_and_tell_single_bits(kernels: CpuKernels, rows: int, size: int) -> None:
    scores = scores_like(kernels, "plain", rows, size + 2)[:, :size]
    places = list(range(rows))[::-1]
    digests = KernelScan(kernels).digests(scores, places).tolist()
    for row, digest in zip(scores[places], digests, strict=True):
        content = row.contiguous().view(torch.uint8).numpy().tobytes()
        words = array("Q", content + bytes(-len(content) % 8))
        mixed = [_mixed(_mixed(word + (n + 1) * GOLDEN) + (n + 1) * GOLDEN) for n, word in enumerate(words)]
        assert digest % 2**64 == sum(mixed) % 2**64
    assert LogitsScan().digests(scores, places).tolist() == digests
    changed = scores.clone()
    patterns = changed.view({2: torch.int16, 4: torch.int32}[kernels.dtype.itemsize])
    patterns[0, size - 1] ^= 1
    after = KernelScan(kernels).digests(changed, places).tolist()
    assert [one == other for one, other in zip(after, digests, strict=True)] == [row > 0 for row in places]


def _mixed(value: int) -> int:
    """Of SplitMix64, all steps but the last, whose shift leaves the upper bits alone."""
    value &= 2**64 - 1
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) % 2**64
    return ((value ^ (value >> 27)) * MULTIPLIER_2) % 2**64


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("some_tokens", [False, True])
@pytest.mark.parametrize(("case", "spread"), [("plain", 0.1), ("plain", 3.0), ("ties", 2.0), ("excluded", 8.0)])
@pytest.mark.parametrize("size", [1, 130, 4500])
def test_drawn_tokens_are_the_samplers(
    kernels: CpuKernels, case: str, spread: float, size: int, some_tokens: bool
) -> None:
    """At temperatures that make one token certain, and all of them alike; rows that are not finite have none."""
    temperatures = [0.0, 1e-40, 0.01, 0.3, 0.8, 1.0, 2.0, 100.0] * 6
    scores = scores_like(kernels, case, len(temperatures), size) * spread
    token_ids = torch.randperm(3 * size, generator=torch.manual_seed(1))[:size].sort().values if some_tokens else None
    for row, value in ((3, math.nan), (4, math.inf), (11, -math.inf), (17, math.nan)):
        scores[row, : None if value < 0 else 1] = value
    rows = [
        SamplingContext(SamplingParameters(temperature=temperature, seed=2**40 + number), 17 * number, (), 0)
        for number, temperature in enumerate(temperatures)
    ]
    expected = sample_tokens(scores, rows, token_ids)
    assert sample_tokens(scores, rows, token_ids, KernelScan(kernels)) == expected
    if case == "plain":
        assert [row for row, token in enumerate(expected) if token is None] == [3, 4, 11, 17]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("rows", "size"), [(1, 3), (5, 130), (4, 49152)])
def test_forbidden_columns(kernels: CpuKernels, rows: int, size: int) -> None:
    scores = scores_like(kernels, "plain", rows, size)
    wanted = torch.rand(rows, size + 30, generator=torch.manual_seed(size)) < 0.5
    # Whole bytes and words of either kind, which are most of what grammars say.
    wanted[:, : size // 3] = True
    wanted[:, size // 3 : size // 2] = False
    bits = np.packbits(wanted.numpy(), axis=1, bitorder="little")
    which = list(range(rows))[::-2]
    expected = scores.clone()
    expected[which] = expected[which].masked_fill(~wanted[: len(which), :size], -torch.inf)
    masked = scores.clone()
    kernels.forbid(masked, which, bits[: len(which)], None)
    assert torch.equal(masked, expected)
    tokens = torch.arange(size) + torch.arange(size) // (size // 2 + 1) * 29
    few = scores.clone()
    kernels.forbid(few, range(rows), bits, tokens)
    assert torch.equal(few, scores.masked_fill(~wanted[:, tokens], -torch.inf))


def test_columns_without_a_bit_are_refused(kernels: CpuKernels) -> None:
    bits = np.full((2, 3), 255, np.uint8)
    for size, tokens in ((25, None), (2, torch.tensor([1, 24]))):
        with pytest.raises(ValueError, match=r"allowed has 24 bits, must have at least 25"):
            kernels.forbid(rounded(kernels, 2, size), [0, 1], bits, tokens)
