"""Compiles Triton kernels for GPUs that need not be there, by NVIDIA's assembler, which Triton's wheel carries.

In processes without TRITON_INTERPRET only: where Triton has its interpreter, it compiles nothing.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import JITFunction, driver

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_THREADS_OF_A_WARP = 32


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    aligned: Iterable[str],
    constants: Mapping[str, object],
    options: Mapping[str, object],
    architecture: int,
) -> CompiledKernel:
    """`types` are Triton's, of the parameters that are no constants; those `aligned` are multiples of 16."""
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        dict.fromkeys(names, "constexpr") | dict(types),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=_target(architecture), options=dict(options))


def launched(call: Callable[[], object], architecture: int) -> list[CompiledKernel]:
    """The kernels that `call` launches, compiled for its arguments, which may be on a CPU. None of them runs, nor does
    any that this process launches later on a GPU of its own."""
    run, found = JITFunction.run, []

    def compile_only(kernel: Any, *arguments: object, warmup: bool, **options: object) -> None:
        found.append(run(kernel, *arguments, warmup=True, **options))

    # Triton keeps the kernels of each device.
    gpu = SimpleNamespace(
        get_current_target=lambda: _target(architecture),
        get_current_device=lambda: architecture,
        get_current_stream=lambda _: 0,
    )
    driver.set_active(gpu)
    with mock.patch.object(JITFunction, "run", compile_only):
        call()
    return found


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack: in a kernel without arrays, these are spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump names no resources: {text.strip()!r}")
    return int(found[1]), int(found[2])


def _target(architecture: int) -> GPUTarget:
    return GPUTarget("cuda", architecture, _THREADS_OF_A_WARP)
