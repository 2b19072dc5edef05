"""Triton's kernels on a CPU: its interpreter runs them program by program (see tests/conftest.py)."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def interpreted_attention() -> ModuleType:
    pytest.importorskip("triton", reason="Triton is made for Linux only")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("another processor: on this GPU tests/engine/test_gpu_engine.py has the kernel itself")
    return importlib.import_module("engine.cuda.triton_attention")
