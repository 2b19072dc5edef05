"""Compiles Triton kernels for GPUs that need not be there, by NVIDIA's assembler, which Triton's wheel carries.

In processes without TRITON_INTERPRET only: where Triton has its interpreter, it compiles nothing.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_THREADS_OF_A_WARP = 32


@dataclass(frozen=True)
class Build:
    """A compiled kernel. In a kernel without arrays, the stack of a thread holds spilled registers. `products` are the
    shapes of the matrix units' instructions."""

    name: str
    ttgir: str
    ptx: str
    stack: int
    shared_memory: int

    @property
    def products(self) -> set[str]:
        return set(re.findall(r"(?:wgmma|mma|tcgen05\.mma)[\w.:]*\.(m\d+n\d+k\d+|kind::f16)", self.ptx))


def builds(call: Callable[[], object], architecture: int) -> list[Build]:
    """The kernels that `call` launches, compiled for its arguments, which are on a CPU. None of them runs, nor does any
    that this process launches later."""
    run, found = JITFunction.run, list[CompiledKernel]()

    def compile_only(kernel: Any, *arguments: object, warmup: bool, **options: object) -> None:
        found.append(run(kernel, *arguments, warmup=True, **options))

    driver.set_active(_gpu(architecture))
    with mock.patch.object(JITFunction, "run", compile_only):
        call()
    return [
        Build(
            kernel.metadata.name,
            kernel.asm["ttgir"],
            kernel.asm["ptx"],
            _stack(kernel.asm["cubin"]),
            kernel.metadata.shared,
        )
        for kernel in found
    ]


def _gpu(architecture: int) -> SimpleNamespace:
    # Triton keeps the kernels of each device.
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", architecture, _THREADS_OF_A_WARP),
        get_current_device=lambda: architecture,
        get_current_stream=lambda _: 0,
    )


def _stack(cubin: bytes) -> int:
    """Bytes of a thread's stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump names no resources: {text.strip()!r}")
    return int(found[1])


def asked_for(call: Callable[[], object], architecture: int) -> set[str]:
    """Names and variants of the kernels that `call` launches, none of which is made, nor runs."""
    asked = set()

    def ask(*, fn: Any, key: str, **about: object) -> bool:
        asked.add(f"{fn.name} {key}")
        return True

    driver.set_active(_gpu(architecture))
    with mock.patch.object(triton.knobs.runtime, "jit_cache_hook", ask):
        call()
    return asked
