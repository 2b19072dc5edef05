"""All kernels compile with the Triton that was measured on a GPU (docs/gpu.md), which is older than that of tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.dependencies import ROOT

pytestmark = pytest.mark.long

MEASURED = "triton==3.6.0"
TESTS = ("tests/engine/test_triton_builds.py", "tests/engine/test_made_ahead.py")


def test_kernels_compile_with_the_triton_that_was_measured(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), MEASURED]
    subprocess.run(pip, check=True, timeout=300)
    # The folder comes before what is installed.
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    version = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    found = subprocess.run(version, env=environment, capture_output=True, text=True, check=True).stdout
    assert found.strip() == MEASURED.partition("==")[2]
    chosen = ["-k", "test_kernels_compile or after_the_warm_up", "-m", "slow or not slow"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, *chosen]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert " passed" in ended.stdout
