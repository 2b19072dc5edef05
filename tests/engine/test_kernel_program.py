"""The CPU kernels in a program without Python: under sanitizers, and for ARM in an emulator."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from spool.engine.cpu.compiler import FLAGS, SOURCES
from spool.engine.cpu.isa import InstructionSet, available_isas, compiler_options

PROGRAM = Path(__file__).parent / "kernels" / "check_kernels.c"
EMULATED = PROGRAM.with_name("avx512_by_avx2.h")
# Of all that the kernels computed, by element: the same on every processor.
GOLDEN = {"BF16": "20d62b8b03095094", "F16": "b30150f616715f0b", "F32": "f24709d6f90a10ee"}
ELEMENTS = tuple(GOLDEN)
SANITIZED = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

# Bits must not depend on these.
BITS = tuple(flag for flag in FLAGS if flag.startswith(("-std", "-ff", "-fno-math", "-fopenmp")))

ARM = {"NEON": "-march=armv8-a", "NEON with bfloat16": "-march=armv8.2-a+bf16+dotprod"}
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


def built(compiler: str, options: Sequence[str], element: str, folder: Path, sources: Path = SOURCES) -> Path:
    """The program for one dtype. Skips without the compiler."""
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    program = folder / "check_kernels"
    files = [str(PROGRAM), *map(str, sorted(sources.glob("*.c")))]
    command = [compiler, *BITS, *options, f"-DELEMENT_{element}", f"-I{sources}", "-o", str(program), *files, "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


def run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    # Two threads, so that kernels share out their rows.
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)


@pytest.mark.parametrize(
    ("isa", "element"),
    [
        pytest.param(isa, element, id=f"{isa.name}-{element}", marks=[] if element == "BF16" else pytest.mark.slow)
        for isa in available_isas()
        for element in ELEMENTS
    ],
)
def test_kernels_give_the_golden_bits(isa: InstructionSet, element: str, tmp_path: Path) -> None:
    done = run([built("gcc", ["-O1", "-DUNIVERSAL", "-Wno-psabi", *compiler_options(isa)], element, tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[1] == GOLDEN[element]


# Every dtype and every instruction set: the code between the two is the same for all.
@pytest.mark.long
@pytest.mark.parametrize(
    ("isa", "element"),
    [(isa, element) for isa in available_isas() for element in (ELEMENTS if isa is available_isas()[0] else ("BF16",))],
    ids=lambda value: getattr(value, "name", value),
)
def test_sanitizers_find_nothing(isa: InstructionSet, element: str, tmp_path: Path) -> None:
    options = compiler_options(isa)
    done = run([built("gcc", [*SANITIZED, *options], element, tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("agree: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "element"),
    [
        pytest.param(options, element, id=f"{name}-{element}", marks=[] if element == "BF16" else pytest.mark.long)
        for name, options in ARM.items()
        for element in ELEMENTS
    ],
)
def test_kernels_for_arm_in_an_emulator(options: str, element: str, tmp_path: Path) -> None:
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"there is no {EMULATOR} here")
    program = built(CROSS_COMPILER, ["-O3", options, "-static"], element, tmp_path)
    done = run([EMULATOR, "-cpu", "max", program])
    assert done.returncode == 0, done.stdout + done.stderr
    agree, digest = done.stdout.splitlines()
    if element == "BF16" and "bf16" in options:
        assert agree == "agree: 4 lanes, products of pairs"
    else:
        assert agree == "agree: 4 lanes, products"
        assert digest == GOLDEN[element]


# A processor with AVX2 does what one with AVX-512 would, instruction by instruction; where there are the instructions
# themselves, other tests run them.
HAS_VNNI = any("-mavx512vnni" in compiler_options(isa) for isa in available_isas())


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions are emulated by AVX2")
@pytest.mark.parametrize(
    "vnni",
    [
        pytest.param([], marks=pytest.mark.long, id="plain"),
        pytest.param(["-DWITH_VNNI"], marks=[pytest.mark.long] if HAS_VNNI else [], id="VNNI"),
    ],
)
def test_kernels_for_avx512_in_an_emulator(vnni: Sequence[str], tmp_path: Path) -> None:
    emulated = ["-O2", "-march=x86-64-v3", "-Wno-psabi", *vnni, "-include", str(EMULATED)]
    done = run([built("gcc", emulated, "BF16", tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"agree: 16 lanes, products\n{GOLDEN['BF16']}\n"
