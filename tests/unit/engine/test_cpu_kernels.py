"""The CPU kernels against the same mathematics in float64, and a row's bits in any company."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from spool.engine.attention.backends import AttentionRule, Span
from spool.engine.cpu.attention import KernelBackend
from spool.engine.cpu.kernels import CpuKernels, Panels
from spool.engine.cpu.logits_scan import KernelScan
from spool.engine.kv.paged_kv import LayerKv
from spool.engine.layers.description import Activation, Norm
from spool.engine.quantization import rounding as quantization
from spool.engine.sampling.logits_scan import LogitsScan
from spool.engine.sampling.noise import GOLDEN, MULTIPLIER_1, MULTIPLIER_2
from tests.support import reference_attention
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


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_parts_of_inputs_are_summed_in_pairs(kernels: CpuKernels, bits: int | None) -> None:
    """As ranks do that have a part each, and exchange sums that nobody has rounded."""
    kernels = compiled_kernels(kernels.dtype, kernels.isa, universal=True)
    weight, rows = rounded(kernels, 100, 256), rounded(kernels, 13, 256, seed=3)
    bias = kernels.padded_bias(rounded(kernels, 100, seed=2))

    def panels(part: torch.Tensor) -> Panels:
        part = part.contiguous()
        return (
            kernels.to_panels(part) if bits is None else kernels.to_quantized_panels(quantization.rounded(part, bits))
        )

    def sums(parts: int, first: int, last: int) -> torch.Tensor:
        own_bias = bias if first == 0 else None
        part = rows[:, first:last].contiguous()
        return kernels.linear(part, panels(weight[:, first:last]), own_bias, 100, parts, exact=True)

    quarters = [sums(1, first, first + 64) for first in range(0, 256, 64)]
    halves = [quarters[0] + quarters[1], quarters[2] + quarters[3]]
    assert torch.equal(halves[0], sums(2, 0, 128))
    assert torch.equal(halves[1], sums(2, 128, 256))
    assert torch.equal(halves[0] + halves[1], sums(4, 0, 256))
    whole = torch.cat([kernels.linear(some, panels(weight), bias, 100, 4) for some in rows.split([1, 7, 3, 2])])
    assert torch.equal(whole, (halves[0] + halves[1]).to(kernels.dtype))


class Pages:
    """A pool of random keys and values, and sequences on pages in no order."""

    def __init__(
        self,
        kernels: CpuKernels,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        quantized: bool = False,
    ) -> None:
        self.layer = LayerKv(PAGES, kv_heads, page_size, head_dim, kernels.dtype, torch.device("cpu"), quantized)
        self.layer.fill(rounded(kernels, 2, PAGES, kv_heads, page_size, head_dim))
        self.page_size = page_size
        self._rng = random.Random(3)

    def spans(self, places: list[tuple[int, int]]) -> list[Span]:
        """Of (start, rows)."""
        spans, first = [], 0
        for start, rows in places:
            pages = self._rng.sample(range(PAGES), -(-(start + rows) // self.page_size))
            spans.append(Span(first, rows, start, pages))
            first += rows
        return spans


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
    pages = Pages(kernels, *shape[1:], quantized)
    backend = KernelBackend(kernels, shape[3])
    spans = pages.spans(PLACES)
    rows = spans[-1].first_row + spans[-1].rows
    queries = rounded(kernels, rows + 3, shape[0], shape[2], seed=9)
    attended = backend.plan(spans, rows + 3).attend(pages.layer, queries, RULES[rule])
    assert not attended[rows:].any()
    exact = reference_attention.attended(pages.layer, queries, RULES[rule], spans)
    assert (attended.double() - exact).abs().max() < 0.01
    torch.set_num_threads(1)
    for span in spans:
        for row in range(span.rows):
            alone = backend.plan([Span(0, 1, span.start + row, span.pages)], 1)
            place = slice(span.first_row + row, span.first_row + row + 1)
            assert torch.equal(alone.attend(pages.layer, queries[place], RULES[rule]), attended[place])


@pytest.mark.parametrize("quantized", [False, True], ids=["elements", "codes"])
@pytest.mark.parametrize(("start", "first_bad"), [(20, 24), (29, 31), (60, 63)])
def test_what_a_row_does_not_see_may_be_no_number(
    kernels: CpuKernels, start: int, first_bad: int, quantized: bool
) -> None:
    pages = Pages(kernels, 2, 64, 16, quantized)
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


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("rows", "size"), [(1, 3), (5, 130), (4, 49152)])
def test_digests_are_those_of_plain_python_and_tell_single_bits(kernels: CpuKernels, rows: int, size: int) -> None:
    scores = rounded(kernels, rows, size + 9)[:, :size]
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
@pytest.mark.parametrize(("rows", "size"), [(1, 3), (5, 130), (4, 49152)])
def test_forbidden_columns(kernels: CpuKernels, rows: int, size: int) -> None:
    scores = rounded(kernels, rows, size + 9)[:, :size]
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


@pytest.mark.usefixtures("threads")
# Compiling the portable ones takes a minute.
@pytest.mark.parametrize(
    ("dtype", "isas"),
    [
        (torch.bfloat16, [isa for isa in ISAS if isa != "portable"] or ISAS),
        *(pytest.param(dtype, ISAS, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.float32)),
    ],
    ids=str,
)
def test_universal_kernels_give_the_same_bits_on_every_instruction_set(dtype: torch.dtype, isas: list[str]) -> None:
    first, *others = (list(_results(compiled_kernels(dtype, isa, universal=True))) for isa in isas)
    for other in others:
        for one, same in zip(first, other, strict=True):
            assert torch.equal(one.view(torch.uint8), same.view(torch.uint8))


def _results(kernels: CpuKernels) -> Iterator[torch.Tensor]:
    """Of numbers with many digits, whose sums depend on their order."""
    weight, rows = rounded(kernels, 100, 576) / 24, rounded(kernels, 13, 576, seed=3)
    yield kernels.linear(rows, kernels.to_panels(weight), None, 100)
    for bits in (4, 8):
        yield kernels.linear(rows, kernels.to_quantized_panels(quantization.rounded(weight, bits)), None, 100)
    weight, bias = rounded(kernels, 2, 576, seed=4).float()
    for norm in (Norm(weight, 1e-5), Norm(weight, 1e-5, bias, centred=True)):
        yield kernels.norm(rows, norm)
    for activation in Activation:
        yield kernels.activate(rounded(kernels, 13, 1152, seed=5), activation, gated=True)
    yield kernels.cap(rounded(kernels, 13, 100, seed=6), 0.5, 1.5)
    for quantized in (False, True):
        for shape in SHAPES:
            pages = Pages(kernels, *shape[1:], quantized)
            spans = pages.spans(PLACES)
            queries = rounded(kernels, spans[-1].first_row + spans[-1].rows, shape[0], shape[2], seed=9)
            plan = KernelBackend(kernels, shape[3]).plan(spans, len(queries))
            yield from (plan.attend(pages.layer, queries, rule) for rule in RULES.values())
