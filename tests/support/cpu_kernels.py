"""The CPU kernels for tests, of every instruction set that this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from spool.engine.cpu.compiler import FLAGS, SOURCES, CompilationError, compiler_command
from spool.engine.cpu.isa import AUTO, available_isas
from spool.engine.cpu.kernels import CpuKernels, load_cpu_kernels

ISAS = tuple(isa.name for isa in available_isas())
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
BITS = tuple(flag for flag in FLAGS if flag.startswith(("-std", "-ff", "-fno-math", "-fopenmp")))
"""Of the options for compilers, those that bits depend on."""


def compiled_kernels(dtype: torch.dtype = torch.bfloat16, isa: str = AUTO, universal: bool = False) -> CpuKernels:
    """The kernels for this processor. Skips without the compiler that is asked for."""
    try:
        compiler_command()
    except CompilationError as error:
        pytest.skip(str(error))
    return load_cpu_kernels(dtype, lambda *_: None, isa, universal=universal)


def kernel_program(
    main: Path, compiler: str, element: str, options: Sequence[str], folder: Path
) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Runs a program of the kernels and this `main`, with two threads; on ARM in an emulator, where the compiler is the
    one for it. Skips where one of both is missing."""
    command = [EMULATOR, "-cpu", "max"] if compiler == CROSS_COMPILER else []
    for needed in (compiler, *command[:1]):
        if shutil.which(needed) is None:
            pytest.skip(f"there is no {needed} here")
    program = folder / main.stem
    made = [compiler, *BITS, *options, f"-DELEMENT_{element}", f"-I{SOURCES}", "-o", program, main]
    subprocess.run([*made, *sorted(SOURCES.glob("*.c")), "-lm"], check=True, capture_output=True)
    # Two threads, so that kernels share out their rows.
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    return lambda *given: subprocess.run(
        [*command, program, *given], capture_output=True, check=False, env=environment, timeout=300
    )
