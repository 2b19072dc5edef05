"""The CPU kernels for tests, of every instruction set that this machine has."""

from __future__ import annotations

import pytest
import torch

from spool.engine.cpu.compiler import CompilationError, compiler_command
from spool.engine.cpu.isa import AUTO, available_isas
from spool.engine.cpu.kernels import CpuKernels, load_cpu_kernels

ISAS = tuple(isa.name for isa in available_isas())
NEEDS_ONEDNN_BF16 = "another processor: needs AVX-512, without which oneDNN does not multiply bfloat16"


def compiled_kernels(dtype: torch.dtype = torch.bfloat16, isa: str = AUTO, universal: bool = False) -> CpuKernels:
    """The kernels for this processor. Skips without a compiler; fails where the compiler refuses them."""
    try:
        compiler_command()
    except CompilationError:
        pytest.skip("no C compiler")
    kernels = load_cpu_kernels(dtype, lambda *_: None, isa, universal=universal)
    assert kernels is not None, "the CPU kernels cannot be compiled or loaded; the log says why"
    return kernels
