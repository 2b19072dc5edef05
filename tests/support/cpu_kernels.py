"""The CPU kernels for tests, of every instruction set that this machine has."""

from __future__ import annotations

import torch

from spool.engine.cpu.isa import AUTO, available_isas
from spool.engine.cpu.kernels import CpuKernels, load_cpu_kernels

ISAS = tuple(isa.name for isa in available_isas())


def compiled_kernels(dtype: torch.dtype = torch.bfloat16, isa: str = AUTO, universal: bool = False) -> CpuKernels:
    """The kernels for this processor."""
    return load_cpu_kernels(dtype, lambda *_: None, isa, universal=universal)
