"""All Triton kernels compile for the GPUs that Spool supports, and keep their numbers in registers."""

from __future__ import annotations

import math
import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product as product_of
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from spool.engine.attention.backends import AttentionRule, Span
from spool.engine.kv.paged_kv import PagedKv
from spool.engine.layers.description import Activation, HeadNorms, Norm
from spool.engine.quantization.weights import QuantizedWeight

if TYPE_CHECKING:
    from spool.engine.cuda.triton_product import Parts
    from spool.engine.cuda.triton_rows import NormOfHeads
    from tests.support.triton_builds import Build

pytest.importorskip("triton", reason="Triton is made for Linux only")

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# By compute capability, bytes of shared memory that one block can have (CUDA C++ Programming Guide).
MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# All products of a GPU are made of one instruction, so that rows have one order of sums.
PRODUCTS = dict.fromkeys((80, 86, 89, 120), r"m16n8k16") | {90: r"m64n\d+k16", 100: r"kind::f16"}
# Bytes of a thread of attention, which has few between two splits.
MAX_SPILLED = 64


def overlapping(architecture: int) -> bool:
    return architecture >= 90


def attention(
    architecture: int,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    page_size: int,
    window: int | None = None,
    quantized: bool = False,
    wide: bool = False,
) -> Iterator[Callable[[], object]]:
    from spool.engine.cuda.triton_attention import TritonBackend

    kv = PagedKv(1, 1, page_size, 2, head_dim, dtype, CPU, quantized)
    rows = 64 if wide else 1
    query = torch.zeros(rows, 2 * group, head_dim, dtype=dtype)
    backend = TritonBackend(2 * group, 2, page_size, CPU, overlapping(architecture), 0.0 if wide else math.inf)
    rule = AttentionRule(0.1) if window is None else AttentionRule(0.1, window, 50.0, torch.zeros(2 * group))
    yield lambda: backend.plan([Span(0, rows, 0, [0] * rows)], rows).attend(kv.layers[0], query, rule)


def products(architecture: int, out_features: int, in_features: int, *all_rows: int) -> Iterator[Callable[[], object]]:
    return products_of(torch.empty(out_features, in_features, dtype=BF16), architecture, in_features, all_rows)


def code_products(
    architecture: int, bits: int, group: int, words: bool, *all_rows: int
) -> Iterator[Callable[[], object]]:
    codes = torch.empty(4096, 4096 * bits // 8, dtype=torch.uint8)
    scales = torch.empty(4096, 4096 // group)
    weight = QuantizedWeight(bits, group, codes, scales, scales)
    return products_of(weight, architecture, 4096, all_rows, words)


def products_of(
    weight: torch.Tensor | QuantizedWeight,
    architecture: int,
    in_features: int,
    all_rows: tuple[int, ...],
    words: bool = False,
) -> Iterator[Callable[[], object]]:
    from spool.engine.cuda.triton_product import product_parts

    for rows in all_rows:
        inputs = torch.empty(rows, in_features, dtype=BF16)
        yield partial(product_parts, inputs, weight, None, overlapping(architecture), words, MEMORY[architecture])


def decoder_rows(
    architecture: int, dtype: torch.dtype, head_dim: int, hidden: int, parts: int, quantized: bool = False
) -> Iterator[Callable[[], object]]:
    """Of layers like Llama's or, in several parts, Qwen3's."""
    from spool.engine.cuda.triton_rows import Added, activate, add_norm, rotate_write

    overlap, product = overlapping(architecture), partial(product_in_parts, dtype, parts)
    layer = PagedKv(1, 1, 16, 8, head_dim, dtype, CPU, quantized).layers[0]
    rows, norm = torch.zeros(1, hidden, dtype=dtype), zero_norm(hidden)
    angles, slots = torch.zeros(1, head_dim // 2, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    norms = None if parts == 1 else zero_norm_of_heads(32, 8, head_dim)
    yield lambda: add_norm(rows, None if parts == 1 else Added(product(hidden)), norm, overlap)
    yield lambda: rotate_write(product(48 * head_dim), angles, angles, slots, layer, 32, norms, overlap)
    yield lambda: activate(product(2 * 9728), dtype, Activation.SILU, overlap=overlap)


def described_rows(
    architecture: int,
    dtype: torch.dtype,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    parts: int,
    quantized: bool = False,
) -> Iterator[Callable[[], object]]:
    """Whatever else a description can say."""
    from spool.engine.cuda.triton_rows import Added, activate, add_norm, rotate_write

    overlap, product = overlapping(architecture), partial(product_in_parts, dtype, parts)
    layer = PagedKv(1, 1, 16, kv_heads, head_dim, dtype, CPU, quantized).layers[0]
    rows, slots = torch.zeros(1, hidden, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    angles, qkv = torch.zeros(1, head_dim // 2), product((query_heads + 2 * kv_heads) * head_dim)
    yield lambda: add_norm(rows, Added(product(hidden), None, 0.5), None, overlap)
    for centred in (False, True):
        norm = zero_norm(hidden, centred)
        yield partial(add_norm, rows, Added(product(hidden), norm, 0.5), norm, overlap, of_residual=centred)
        # No family centres whole queries.
        for whole, after_rotation in ((False, False), (False, True), (True, False))[: 2 if centred else 3]:
            norms = zero_norm_of_heads(query_heads, kv_heads, head_dim, centred, whole, after_rotation)
            yield partial(rotate_write, qkv, angles, angles, slots, layer, query_heads, norms, overlap)
    for activation, gated in product_of(Activation, (False, True)):
        yield partial(activate, product(2 * 9728), dtype, activation, gated, overlap)


def product_in_parts(dtype: torch.dtype, parts: int, width: int) -> Parts:
    from spool.engine.cuda.triton_product import Parts

    return Parts(torch.zeros(parts, 1, width, dtype=dtype if parts == 1 else FP32))


def zero_norm(width: int, centred: bool = False) -> Norm:
    """With a bias if it is centred."""
    return Norm(torch.zeros(width), 1e-6, torch.zeros(width) if centred else None, centred)


def zero_norm_of_heads(
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    centred: bool = False,
    whole: bool = False,
    after_rotation: bool = False,
) -> NormOfHeads:
    from spool.engine.cuda.triton_rows import NormOfHeads

    queries, keys = (zero_norm(heads * head_dim, centred) for heads in (query_heads, kv_heads))
    return NormOfHeads.of(HeadNorms(queries, keys, whole, after_rotation))


def sampling(
    architecture: int, dtype: torch.dtype, temperature: float, some_tokens: bool, top_k: int = 0
) -> Iterator[Callable[[], object]]:
    from spool.engine.cuda.triton_sampling import TritonScan
    from spool.engine.sampling.context import SamplingContext
    from spool.scheduler.sampling import SamplingParameters

    logits = torch.zeros(2, 151_936, dtype=dtype)
    token_ids = torch.arange(151_936) if some_tokens else None
    if top_k:
        rows = [SamplingContext(SamplingParameters(temperature, logit_bias={1: 2.0}), 1, (), 1)] * 2
        yield lambda: TritonScan().sample(logits, rows, token_ids)
        yield lambda: TritonScan().digests(logits, [1])
        yield lambda: TritonScan().logprobs(logits, [1], torch.tensor([0]), 2)
        yield lambda: TritonScan().forbid(logits, [1], np.zeros((1, 18_992), np.uint8), token_ids)
    drawn = [SamplingContext(SamplingParameters(temperature, top_k, seed=1), 1, (), 1)] * 2
    yield lambda: TritonScan().sample(logits, drawn, token_ids)


def experts(architecture: int, dtype: torch.dtype, has_bias: bool) -> Iterator[Callable[[], object]]:
    """With biases, weights are transposed."""
    from spool.engine.cuda.triton_experts import TritonExperts, TritonRouting
    from spool.engine.layers.experts import Experts

    gate_up, down = torch.empty(8, 2 * 768, 2048, dtype=dtype), torch.empty(8, 2048, 768, dtype=dtype)
    biases = (None, None)
    if has_bias:
        gate_up, down = gate_up.reshape(8, 2048, -1).transpose(1, 2), down.reshape(8, 768, -1).transpose(1, 2)
        biases = (torch.empty(8, 2 * 768, dtype=dtype), torch.empty(8, 2048, dtype=dtype))
    chosen = torch.tensor([[3, 5]])
    own = TritonExperts(Experts(gate_up, down, *biases, lambda rows: rows[:, :768], False))
    yield lambda: own(torch.zeros(1, 2048, dtype=dtype), chosen, torch.zeros(1, 2, dtype=dtype))
    linear = torch.nn.Linear(2048, 8, bias=has_bias, dtype=FP32 if has_bias else dtype)
    yield lambda: TritonRouting(linear)(torch.zeros(1, 2048, dtype=linear.weight.dtype))


MAKERS: dict[str, Callable[..., Iterator[Callable[[], object]]]] = {
    "attention": attention,
    "products": products,
    "products of codes": code_products,
    "rows": decoder_rows,
    "described rows": described_rows,
    "sampling": sampling,
    "experts": experts,
}
CASES: list[tuple[str, tuple[object, ...]]] = [
    ("attention", (80, BF16, 64, 1, 16)),
    ("attention", (80, FP32, 128, 4, 64)),
    ("attention", (89, FP16, 256, 7, 16)),
    ("attention", (90, BF16, 128, 4, 16)),
    ("attention", (90, BF16, 128, 4, 16, None, False, True)),
    ("attention", (90, FP32, 256, 8, 64)),
    ("attention", (100, FP16, 96, 5, 64)),
    ("attention", (80, BF16, 256, 2, 16, 4096)),
    ("attention", (90, BF16, 64, 8, 16, 128)),
    ("attention", (80, BF16, 128, 4, 16, None, True)),
    ("attention", (89, FP16, 64, 8, 32, 128, True)),
    ("attention", (90, BF16, 128, 4, 16, None, True)),
    ("attention", (90, FP16, 256, 8, 16, 1024, True)),
    ("attention", (100, BF16, 96, 5, 64, None, True)),
    ("attention", (86, BF16, 128, 4, 16)),
    ("attention", (89, BF16, 128, 4, 16, None, False, True)),
    ("attention", (120, BF16, 128, 4, 16)),
    ("attention", (120, BF16, 256, 8, 16, 4096, True)),
    ("products", (80, 4096, 4096, 1, 192, 2048)),
    ("products", (86, 4096, 4096, 1, 40, 160, 192, 2048)),
    ("products", (89, 4096, 4096, 1, 40, 64, 160, 192, 2048)),
    ("products", (89, 24576, 4096, 1, 64, 192, 2048)),
    ("products", (120, 4096, 4096, 1, 64, 192, 2048)),
    ("products", (120, 24576, 4096, 1, 64, 192, 2048)),
    ("products", (90, 4096, 4096, 1, 64, 160, 2048)),
    ("products", (90, 24576, 4096, 1, 192)),
    ("products", (100, 4096, 4096, 1, 192)),
    ("products of codes", (80, 4, 32, True, 1, 192, 2048)),
    ("products of codes", (86, 4, 32, True, 1, 64, 192, 2048)),
    ("products of codes", (89, 4, 32, True, 1, 64, 192, 2048)),
    ("products of codes", (89, 8, 16, True, 1, 64, 192, 2048)),
    ("products of codes", (120, 4, 32, True, 1, 64, 192, 2048)),
    ("products of codes", (120, 8, 16, True, 1, 64, 192, 2048)),
    ("products of codes", (90, 4, 32, False, 1, 64, 192, 2048)),
    ("products of codes", (90, 8, 16, False, 1, 192)),
    ("products of codes", (100, 4, 16, False, 1, 192)),
    ("rows", (80, FP16, 64, 2048, 1)),
    ("rows", (89, BF16, 128, 4096, 2)),
    ("rows", (90, BF16, 128, 5120, 4)),
    ("rows", (120, BF16, 128, 4096, 2)),
    ("rows", (100, FP32, 96, 16384, 2)),
    ("rows", (80, BF16, 64, 2048, 1, True)),
    ("rows", (90, BF16, 128, 5120, 4, True)),
    ("rows", (100, FP32, 96, 16384, 2, True)),
    ("described rows", (80, BF16, 40, 40, 128, 5120, 2, True)),
    ("described rows", (80, FP16, 16, 16, 64, 2048, 1, True)),
    ("described rows", (90, BF16, 40, 40, 128, 5120, 2)),
    ("described rows", (90, BF16, 40, 8, 128, 5120, 4, True)),
    ("described rows", (100, FP32, 48, 8, 96, 8192, 2)),
    ("described rows", (100, BF16, 40, 40, 128, 5120, 2, True)),
    ("described rows", (120, BF16, 40, 40, 128, 5120, 2, True)),
    ("sampling", (80, BF16, 0.7, False, 20)),
    ("sampling", (86, BF16, 0.7, False, 20)),
    ("sampling", (89, FP16, 0.7, False, 20)),
    ("sampling", (90, FP32, 0.7, True)),
    ("sampling", (90, BF16, 0.0, True)),
    ("sampling", (90, BF16, 0.7, False, 20)),
    ("sampling", (100, FP32, 0.7, True, 20)),
    ("sampling", (120, BF16, 0.7, False, 20)),
    ("experts", (80, BF16, True)),
    ("experts", (89, BF16, False)),
    ("experts", (90, BF16, False)),
    ("experts", (90, FP16, True)),
    ("experts", (100, BF16, False)),
    ("experts", (120, BF16, True)),
]


def build_all(kind: str, arguments: tuple[int, ...]) -> list[Build]:
    from tests.support.triton_builds import builds

    return [build for call in MAKERS[kind](*arguments) for build in builds(call, arguments[0])]


@pytest.fixture(scope="module")
def compiler() -> Iterator[ProcessPoolExecutor]:
    """A process without Triton's interpreter."""
    with (
        pytest.MonkeyPatch.context() as patch,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor,
    ):
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield executor


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "quantized"), [(BF16, False), (BF16, True), (FP16, False), (FP16, True), (FP32, False)]
)
@pytest.mark.parametrize("architecture", [80, 89, 90, 100, 120])
def test_attention_keeps_its_numbers_in_registers(
    architecture: int, dtype: torch.dtype, quantized: bool, compiler: ProcessPoolExecutor
) -> None:
    """Of all that it takes: heads of up to 256 dimensions, of which one to 16 are a program's, whole tiles or not, in
    16 bits, and over elements in float32 as well."""
    from spool.engine.cuda.triton_attention import check_fits

    with pytest.raises(ValueError, match="dimensions"):
        check_fits(257, dtype, quantized)
    with pytest.raises(ValueError, match="float32"):
        check_fits(32, FP32, True)
    heads = (32, 64, 80, 128, 256)
    check_fits(max(heads), dtype, quantized)
    for head_dim, group, window in product_of(heads, (1, 3, 8, 16, 20), (None, 1024)):
        arguments = (architecture, dtype, head_dim, group, 16, window, quantized)
        (build,) = compiler.submit(build_all, "attention", arguments).result()
        assert build.stack <= MAX_SPILLED, arguments
        assert build.shared_memory <= MEMORY[architecture], arguments


@pytest.mark.long
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("architecture", [80, 89, 90, 100, 120])
def test_wide_tiles_are_blocks_of_the_same_operations(
    architecture: int, dtype: torch.dtype, compiler: ProcessPoolExecutor
) -> None:
    """Products and reductions have the shapes and the threads that they have in a tile of one block, nothing is fused,
    and the numbers are in registers."""
    from spool.engine.cuda.triton_attention import takes_wide_tiles

    for head_dim, group in product_of((32, 64, 80, 128), (1, 2, 4, 8, 16)):
        assert takes_wide_tiles((2 * group, 2, head_dim), dtype, False)
        found, dots = [], []
        for wide in (False, True):
            arguments = (architecture, dtype, head_dim, group, 16, None, False, wide)
            (build,) = compiler.submit(build_all, "attention", arguments).result()
            assert build.stack <= MAX_SPILLED, arguments
            assert build.shared_memory <= MEMORY[architecture], arguments
            types = re.findall(r"(?:tt\.dot .*?|^ *\}\)) : (.*?) loc", build.ttgir, re.MULTILINE)
            layouts = re.findall(r"^#mma\d* = .*$", build.ttgir, re.MULTILINE)
            arithmetic = re.findall(r" (?:add|sub|mul)\S*\.f32", build.ptx)
            found.append({*types, *layouts, *arithmetic})
            dots.append(build.ttgir.count("tt.dot "))
        assert any("#mma" in what for what in found[0])
        assert all(".rn" in what for what in found[0] if what.endswith(".f32"))
        assert found[0] == found[1], arguments
        assert dots[1] == 4 * dots[0], arguments


# `make test-all` compiles for an A100, an L4 and an H100.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [pytest.param(*case, marks=[] if case[1][0] in (80, 89, 90) else pytest.mark.long) for case in CASES],
)
def test_kernels_compile(kind: str, arguments: tuple[int, ...], compiler: ProcessPoolExecutor) -> None:
    architecture = arguments[0]
    found = compiler.submit(build_all, kind, arguments).result()
    assert found
    # Where warps have the matrix units, numbers go through their registers on the way from codes.
    spills = kind == "attention" or (kind == "products of codes" and architecture not in (90, 100))
    # Of sampling, one number while a division is called.
    max_stack = MAX_SPILLED if spills else 8 * (kind == "sampling")
    for build in found:
        assert build.stack <= max_stack, build.name
        assert build.shared_memory <= MEMORY[architecture], build.name
        # A multiplication and an addition in one operation would give other tokens than both.
        assert "fma.rn.f64" not in build.ptx
        waits = [build.ptx.count(f"griddepcontrol.{what};") for what in ("launch_dependents", "wait")]
        assert waits == [kind not in ("sampling", "experts") and overlapping(architecture)] * 2, build.name
        if kind.startswith("products") or build.name == "_multiply_pairs":
            assert build.products
            assert all(re.fullmatch(PRODUCTS[architecture], shape) for shape in build.products)
            # Weights are expanded as torch does it, and instructions take the inner dimension in its order.
            assert "fma.rn.f32" not in build.ptx
            assert re.findall(r"kWidth = (?!2\b)", build.ttgir) == []
            # Nothing is read or written before it is the kernel's turn.
            before, *after = build.ptx.split("griddepcontrol.wait;")
            assert not after or not re.search(r"ld\.global|st\.global|cp\.async", before)
