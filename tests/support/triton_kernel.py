"""Triton's kernels on a CPU: its interpreter runs them program by program (see tests/conftest.py)."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.quick_interpreter import quicken


def interpreted_attention() -> ModuleType:
    return interpreted("spool.engine.cuda.triton_attention")


def interpreted(module: str) -> ModuleType:
    pytest.importorskip("triton", reason="Triton is made for Linux only")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("another processor: on this GPU tests/engine/test_gpu_engine.py has the kernel itself")
    quicken()
    return importlib.import_module(module)


def multiply_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the interpreter's products one order of sums, as a GPU's matrix units have, and bfloat16, to which numbers
    are rounded as a GPU rounds.

    The interpreter itself multiplies with numpy, whose BLAS adds up some rows of a tile in another order than others on
    some processors, takes bfloat16 for the integers that it keeps it in, and cuts numbers off.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(builder: object, source: Any, to: Any) -> Any:
        if to.scalar.name != "bf16" or source.dtype.scalar.name not in ("fp32", "int8"):
            return cast(builder, source, to)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), to.scalar)

    def numbers(tile: Any) -> Any:
        data = tile.data
        return (data.astype(np.uint32) << 16).view(np.float32) if data.dtype == np.uint16 else data.astype(np.float32)

    def create_dot(_: object, a: Any, b: Any, d: Any, input_precision: object, max_num_imprecise_acc: object) -> Any:
        left, right, sums = numbers(a), numbers(b), d.data.copy()
        for inner in range(left.shape[1]):
            sums += left[:, inner, None] * right[None, inner, :]
        return interpreter.TensorHandle(sums, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast_impl)
