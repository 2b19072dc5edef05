"""The libraries of whole wheels: for which systems they are, and what they compute, for ARM in an emulator."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import zipfile
from itertools import product
from pathlib import Path

import pytest

from spool.engine.cpu.compiler import ELEMENTS, FLAGS, SOURCES, Flavour
from spool.engine.cpu.isa import builds_for
from tests.engine.test_kernel_program import GOLDEN, PROGRAM
from tests.support.cpu_kernels import CROSS_COMPILER, EMULATOR
from tests.support.wheels import built_from, copied_sources

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

COMPILERS = {"x86_64": "gcc", "aarch64": CROSS_COMPILER}
EMULATORS = {"x86_64": [], "aarch64": [EMULATOR, "-L", "/usr/aarch64-linux-gnu", "-cpu", "max"]}
OLDEST_GLIBC = (2, 28)
SYSTEM = {"libgomp.so.1", "libc.so.6", "libm.so.6", "ld-linux-aarch64.so.1"}


@pytest.fixture(scope="module", params=COMPILERS)
def machine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "x86_64" and platform.machine() != name:
        pytest.skip("another processor: compiles for x86-64 itself")
    for program in (COMPILERS[name], *EMULATORS[name][:1]):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} here")
    return name


@pytest.fixture(scope="module")
def wheel(machine: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(machine)
    tag = f"--config-settings=--build-option=--plat-name=manylinux_2_28_{machine}"
    variables = {"SPOOL_WHEEL_MACHINE": machine, "CC": COMPILERS[machine]}
    return built_from(copied_sources(folder), folder / "wheels", tag, **variables)


@pytest.fixture(scope="module")
def libraries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / "spool" / "engine" / "cpu" / "compiled"


@pytest.fixture(scope="module")
def flavours(machine: str) -> dict[str, Flavour]:
    every = [Flavour(*which) for which in product(builds_for(machine), ELEMENTS, (False, True))]
    return {flavour.name: flavour for flavour in every}


def test_the_wheel_is_for_its_machine_and_any_python(wheel: Path, machine: str) -> None:
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{machine}.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")


def test_all_builds_are_there_and_each_file_once(libraries: Path, flavours: dict[str, Flavour]) -> None:
    entries = json.loads((libraries / "manifest.json").read_text())
    assert entries.keys() == flavours.keys()
    assert {entry["file"] for entry in entries.values()} == {path.name for path in libraries.glob("*.so")}
    assert len({entry["sha256"] for entry in entries.values()}) == len(list(libraries.glob("*.so")))


def test_an_old_enough_glibc_suffices(libraries: Path) -> None:
    for library in libraries.glob("*.so"):
        content = library.read_bytes()
        versions = re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", content)
        assert versions, library
        assert max((int(major), int(minor)) for major, minor in versions) <= OLDEST_GLIBC, library
        needed = {name.decode() for name in re.findall(rb"\0((?:lib|ld-)[\w.+-]+\.so\.\d+)(?=\0)", content)}
        assert "libgomp.so.1" in needed
        assert needed <= SYSTEM, library


def test_they_compute_the_golden_bits(
    libraries: Path, machine: str, flavours: dict[str, Flavour], tmp_path: Path
) -> None:
    """Those that this processor or the emulator can run."""
    entries = json.loads((libraries / "manifest.json").read_text())
    words = set(Path("/proc/cpuinfo").read_text().split())
    tried = set()
    for name, flavour in flavours.items():
        key = (entries[name]["file"], flavour.dtype)
        if key in tried or not (EMULATORS[machine] or flavour.build.needs <= words):
            continue
        tried.add(key)
        agree, digest = run_with(libraries / entries[name]["file"], flavour, machine, tmp_path).splitlines()
        if re.fullmatch(r"agree: \d+ lanes, products", agree):
            assert digest == GOLDEN[ELEMENTS[flavour.dtype]], name
        else:
            assert flavour.dtype == "bfloat16", name
            assert not flavour.universal, name
    assert len(tried) >= 6


def run_with(library: Path, flavour: Flavour, machine: str, folder: Path) -> str:
    """What the program says that checks the kernels, here those of the library."""
    program = folder / "check_kernels"
    bits = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC", "-s", "-O3")]
    options = [*bits, "-O1", "-Wno-psabi", *flavour.build.options, f"-DELEMENT_{ELEMENTS[flavour.dtype]}"]
    options += ["-DUNIVERSAL"] if flavour.universal else []
    command = [COMPILERS[machine], *options, f"-I{SOURCES}", "-o", str(program), str(PROGRAM), str(library)]
    subprocess.run([*command, f"-Wl,-rpath,{library.parent}", "-lm"], check=True, capture_output=True)
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [*EMULATORS[machine], str(program)], capture_output=True, text=True, env=environment, check=False, timeout=600
    )
    assert done.returncode == 0, f"{flavour.name}: {done.stdout}{done.stderr}"
    return done.stdout
