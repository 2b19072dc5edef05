"""The CPU kernels for tests, and why a test of them may be skipped."""

from __future__ import annotations

import os
import shutil

import pytest

from engine.cpu.kernels import CpuKernels, load_cpu_kernels

NEEDS_BF16_PRODUCTS = "another processor: needs AVX-512 BF16, or AVX2"
NEEDS_ONEDNN_BF16 = "another processor: needs AVX-512, without which oneDNN does not multiply bfloat16"


def compiled_kernels() -> CpuKernels:
    """The kernels for this processor. Skips without a compiler; fails where the compiler refuses them."""
    if shutil.which(os.environ.get("CC", "gcc")) is None:
        pytest.skip("no C compiler")
    kernels = load_cpu_kernels(lambda *_: None)
    assert kernels is not None, "the CPU kernels cannot be compiled or loaded; the log says why"
    return kernels
