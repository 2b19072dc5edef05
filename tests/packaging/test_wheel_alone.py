"""The wheel serves on a host without a C compiler, beside whatever else is called like its folders."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen

import httpx
import psutil
import pytest

from tests.support.dependencies import PYPROJECT
from tests.support.no_ray import NoRay
from tests.support.ports import free_ports
from tests.support.waiting import LONG
from tests.support.wheels import BEST, built_from, clean_environment, install, site_packages

pytestmark = pytest.mark.slow

RAISES = "raise ImportError('not of Spool')\n"
DECOYS = ("scheduler", "engine", "spool", "spool/services")
RUNS_A_KERNEL = """
import torch
from spool.engine.cpu.kernels import load_cpu_kernels
kernels = load_cpu_kernels(torch.bfloat16, print)
rows = torch.ones(3, 64).bfloat16()
print(kernels.linear(rows, kernels.to_panels(torch.eye(64).bfloat16()), None, 64).sum().item())
print(open("/proc/self/maps").read())
"""
FINDS_A_LIBRARY = """
from spool.engine.cpu.build import compiled_library
from spool.engine.cpu.isa import available_isas
print(compiled_library(available_isas()[0], "float16", False, print).path)
"""


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a foreign distribution that has two of the folders' names."""
    folder = tmp_path_factory.mktemp("alone")
    foreign = folder / "foreign"
    for name in ("scheduler", "services"):
        (foreign / name).mkdir(parents=True)
        (foreign / name / "__init__.py").write_text(RAISES)
    (foreign / "setup.py").write_text(
        "from setuptools import setup\nsetup(name='foreign', packages=['scheduler', 'services'])\n"
    )
    environment = clean_environment(wheel, PYPROJECT["project"]["dependencies"], folder / "venv")
    install(environment, built_from(foreign, folder / "wheels"))
    assert (site_packages(environment) / "scheduler").is_dir()
    return environment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in DECOYS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(RAISES)
    return tmp_path


def variables(environment: Path, folder: Path) -> dict[str, str]:
    """Those of a process that finds no compiler, and nothing of this project but what is installed."""
    programs = environment / "bin"
    assert not [name for name in ("gcc", "clang", "cc") if shutil.which(name, path=str(programs))]
    return {
        "PATH": str(programs),
        "HOME": str(folder),
        "SPOOL_CACHE": str(folder / "cache"),
        "SPOOL_STATE": str(folder / "state"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def python(environment: Path, folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    command = [environment / "bin" / "python", "-P", "-c", program]
    known = variables(environment, folder)
    return subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, timeout=LONG * 4, check=False)


@pytest.fixture
def served(
    request: pytest.FixtureRequest, environment: Path, folder: Path, tiny_pair: tuple[Path, Path]
) -> Iterator[NoRay]:
    """With the options that the test names."""
    port, grpc_port = free_ports(2)
    command = [environment / "bin" / "spool", "serve", tiny_pair[0], "--no-ray", "--served-model-name", "tiny"]
    command += ["--threads", 1, "--port", port, "--grpc-port", grpc_port, *request.param]
    known = variables(environment, folder)
    with Popen([*map(str, command)], cwd=folder, env=known, stderr=PIPE, text=True) as process:
        try:
            served = NoRay(process, f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}", known)
            served.wait_until_up()
            yield served
        finally:
            process.terminate()


@pytest.mark.parametrize(
    "served", [("--dtype", "bfloat16"), ("--quantization", "int4")], ids=["bfloat16", "int4"], indirect=True
)
def test_it_answers_a_chat_without_a_compiler(served: NoRay, environment: Path, folder: Path) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=asked, timeout=LONG)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    assert answer.json()["choices"][0]["message"]["content"]
    loaded = {each.path for each in psutil.Process(served.process_id("target-0")).memory_maps()}
    compiled = site_packages(environment) / "spool" / "engine" / "cpu" / "compiled"
    assert [path for path in loaded if Path(path).parent == compiled]
    kept = folder / "cache" / "cpu-kernels"
    assert not kept.exists() or os.listdir(kept) == []


def test_kernels_and_torch_share_one_openmp(environment: Path, folder: Path) -> None:
    ended = python(environment, folder, RUNS_A_KERNEL)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == "192.0"
    (runtime,) = set(re.findall(r"/\S*/lib(?:gomp|omp|iomp)\S*\.so\S*", ended.stdout))
    assert Path(runtime).parent.parts[-2:] == ("torch", "lib")


def test_a_damaged_library_is_refused_by_name(environment: Path, folder: Path) -> None:
    whole = python(environment, folder, FINDS_A_LIBRARY)
    assert whole.returncode == 0, whole.stderr
    library = Path(whole.stdout.strip())
    assert library.name.startswith(BEST)
    content = library.read_bytes()
    try:
        library.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        damaged = python(environment, folder, FINDS_A_LIBRARY)
    finally:
        library.write_bytes(content)
    assert damaged.returncode == 1
    assert f"CompilationError: {library} is missing or damaged" in damaged.stderr
    assert not (folder / "cache").exists()
