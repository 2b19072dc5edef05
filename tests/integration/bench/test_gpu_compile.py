"""`python -m bench.gpu compile`: the GPU kernels compile for every GPU, and what would not run on one is found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.dependencies import ROOT

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="Triton is made for Linux only")

KERNEL = "engine/cuda/triton_attention.py"
# What stands in the kernel, what a mistake would make of that, and what is said then.
FAULTS = {
    "a parameter with an annotation": (
        "    queries,\n",
        "    queries: Sequence[float],\n",
        "does not compile",
    ),
    "a product of two types": (
        "tl.dot(query, tl.trans(key), input_precision=precision)",
        "tl.dot(query, tl.trans(key).to(tl.int8), input_precision=precision)",
        "does not compile",
    ),
    "tiles of too many positions": (
        '"tile_positions": min(tuning.positions, tuning.tile_bytes // (dimensions * element_bytes))',
        '"tile_positions": 512',
        "a block can have 101376",
    ),
}


@dataclass(frozen=True)
class Compiled:
    code: int
    result: dict[str, Any]
    told: str


def compiled(folder: Path, cache: Path, *arguments: str) -> Compiled:
    """Runs the command with the sources in `folder`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "compile", "--json", *arguments],
        cwd=folder,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    return Compiled(ended.returncode, json.loads(ended.stdout or "{}"), ended.stderr)


def test_every_kernel_compiles_for_every_gpu(tmp_path: Path) -> None:
    """A sample of all variants, in which every architecture, dtype and head dimension is found."""
    found = compiled(ROOT, tmp_path, "--one-in", "105")
    assert found.code == 0, found.told
    builds = found.result["builds"]
    assert {one["architecture"] for one in builds} == {80, 89, 90, 100}
    assert {one["dtype"] for one in builds} == {"bf16", "fp16", "fp32"}
    assert {one["head_dim"] for one in builds} == {64, 96, 128, 256}
    assert {one["group"] for one in builds} == set(range(1, 9))
    for one in builds:
        assert one["fault"] == ""
        assert one["spilled"] <= 64
        assert 16 <= one["registers"] <= 255
        assert 0 < one["shared_memory"] <= 99 << 10
        assert 0 < one["occupancy"] <= 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_that_no_gpu_could_run_is_found(fault: str, tmp_path: Path) -> None:
    right, wrong, said = FAULTS[fault]
    for package in ("bench", "deploy", "protos", "scheduler", "services", "spool_client"):
        (tmp_path / package).symlink_to(ROOT / package)
    shutil.copytree(ROOT / "engine", tmp_path / "engine", ignore=shutil.ignore_patterns("__pycache__", "demo_assets"))
    source = (tmp_path / KERNEL).read_text(encoding="utf-8")
    assert source.count(right) == 1
    (tmp_path / KERNEL).write_text(source.replace(right, wrong), encoding="utf-8")
    found = compiled(tmp_path, tmp_path / "cache", "--architecture", "89", "--one-in", "193")
    assert found.code == 1
    assert found.result["faults"] == len(found.result["builds"]) == 1
    assert said in found.result["builds"][0]["fault"]
    assert said in found.told


def test_the_interpreter_compiles_nothing(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "compile"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "bench.gpu: TRITON_INTERPRET is 1, with which Triton compiles nothing; unset it\n"
