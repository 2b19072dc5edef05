"""Compiles the Triton kernels for GPUs that need not be there, and says what ptxas made of them.

Triton's wheel carries NVIDIA's assembler, so that a kernel which does not compile, keeps numbers of its registers in
memory, or wants more shared memory than a multiprocessor has, is found on any machine. What a kernel computes is tested
elsewhere (tests/unit/engine/test_triton_attention.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from triton.compiler import CompiledKernel

from engine.cuda import triton_attention
from tests.support.triton_builds import compiled, resources

HEAD_DIMS = (64, 96, 128, 256)
GROUPS = tuple(range(1, 9))
PAGE_SIZES = (16, 64)
# By Triton's name of the type: ours, and bytes.
DTYPES = {"bf16": ("bfloat16", 2), "fp16": ("float16", 2), "fp32": ("float32", 4)}

_POINTERS = ("to", "queries", "keys", "values")
# By Triton's names of their types; the first may begin anywhere.
_UNALIGNED_POINTERS = {"edges": "*i64", "numbers": "*i64"}
_OTHER_POINTERS = {"kept_rows": "*fp32", "kept_sums": "*fp32", "arrived": "*i32"}
MAX_SPILLED = 64
"""Bytes of a thread. NVIDIA's assembler gives up a few registers of its own accord, and heads of 256 dimensions need
some more than a thread has between two splits."""

_KV_HEADS = 8
# On older GPUs a kernel begins when the last one has ended.
_FIRST_OVERLAPPING = 90

BLOCK_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""By compute capability, bytes of shared memory that one block can have (CUDA C++ Programming Guide)."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel is compiled anew for each of these."""

    architecture: int
    dtype: str
    head_dim: int
    group: int
    page_size: int

    def __str__(self) -> str:
        return (
            f"sm_{self.architecture}, {DTYPES[self.dtype][0]}, head_dim {self.head_dim}, {self.group} query heads for "
            f"each KV head, pages of {self.page_size}"
        )


@dataclass(frozen=True, slots=True)
class Build:
    """What came of one. `registers` of a thread; `spilled` bytes of a thread and `shared_memory` bytes of a block.
    `fault`: why the kernel is of no use, or empty."""

    variant: Variant
    fault: str
    registers: int = 0
    spilled: int = 0
    shared_memory: int = 0


def variants(architectures: tuple[int, ...] = tuple(BLOCK_MEMORY)) -> Iterator[Variant]:
    """All that models of the supported families ask for."""
    for shape in itertools.product(architectures, DTYPES, HEAD_DIMS, GROUPS, PAGE_SIZES):
        yield Variant(*shape)


def build(variant: Variant) -> Build:
    """Compiles the attention kernel; whatever the compiler raises becomes a fault."""
    try:
        kernel = _compiled(variant)
        registers, spilled = resources(kernel.asm["cubin"])
    # Triton has errors of its own, those of LLVM and those of the programs that it starts.
    except Exception as error:
        return Build(variant, fault=f"does not compile: {_last_line(error)}")
    shared_memory = kernel.metadata.shared
    fault = ""
    if spilled > MAX_SPILLED:
        fault = f"{spilled} bytes of registers spill to memory"
    if shared_memory > (most := BLOCK_MEMORY[variant.architecture]):
        fault = f"wants {shared_memory} bytes of shared memory, a block can have {most}"
    return Build(variant, fault, registers, spilled, shared_memory)


def _compiled(variant: Variant) -> CompiledKernel:
    """As the launch in `TritonPlan.attend` has it compiled: its tensors begin at multiples of 16 bytes."""
    element_bytes = DTYPES[variant.dtype][1]
    values = triton_attention.constants(
        _KV_HEADS * variant.group,
        _KV_HEADS,
        variant.head_dim,
        variant.page_size,
        element_bytes,
        overlap=variant.architecture >= _FIRST_OVERLAPPING,
    )
    pointers = dict.fromkeys(_POINTERS, f"*{variant.dtype}") | _OTHER_POINTERS
    types = pointers | _UNALIGNED_POINTERS | {"scale": "fp32"}
    options = triton_attention.options(element_bytes)
    return compiled(triton_attention._attend, types, pointers, values, options, variant.architecture)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
