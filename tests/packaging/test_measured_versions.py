"""What was measured on a GPU (docs/gpu.md) had older versions than tests have: kernels compile with its Triton, and a
pair is served by its Python, torch and transformers with the wheels that are carried to such a machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.dependencies import ROOT

pytestmark = pytest.mark.long

MEASURED = "triton==3.6.0"
PYTHON, PACKAGES = "3.12", ("torch==2.11.0", MEASURED, "transformers==5.17.0")
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
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert " passed" in ended.stdout


def test_a_pair_is_served_by_what_was_measured_and_the_carried_wheels(tmp_path: Path) -> None:
    wheels, environment, site = tmp_path / "wheels", tmp_path / "environment", tmp_path / "site"
    python = str(environment / "bin" / "python")
    run(sys.executable, "-m", "bench.gpu.wheels", wheels, "--python", PYTHON)
    run("uv", "venv", "--quiet", "--seed", "--python", PYTHON, environment)
    run(python, "-m", "pip", "install", "--quiet", *PACKAGES)
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site, *wheels.glob("*.whl"))
    command = [python, "-m", "bench.gpu", "--out", tmp_path, "--device", "cpu", "--only", "served"]
    run(*command, PYTHONPATH=str(site))
    found = [json.loads(line) for line in (tmp_path / "findings.jsonl").read_text(encoding="utf-8").splitlines()]
    assert found[-1]["what"] == "done"
    compared = [line for line in found if "equal_texts" in line]
    assert {"target killed", "draft killed"} <= {line["what"] for line in compared}
    assert all(line["equal_texts"] == line["texts"] > 0 for line in compared)


def run(*command: object, **variables: str) -> None:
    words = list(map(str, command))
    # uv finds what is on the path, and pyenv puts one version of Python there.
    others = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{PYTHON}*/bin")
    path = os.pathsep.join(map(str, (Path(sys.executable).parent, os.environ["PATH"], *others)))
    environment = {**os.environ, "PATH": path, **variables}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
