"""The CPU kernels in a program without Python: under sanitizers, and for ARM in an emulator."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from spool.engine.cpu.isa import InstructionSet, available_isas, best_build
from tests.support.cpu_kernels import CROSS_COMPILER, kernel_program

PROGRAM = Path(__file__).parent / "kernels" / "check_kernels.c"
EMULATED = PROGRAM.with_name("avx512_by_avx2.h")
# Of all that the kernels computed, by element: the same on every processor.
GOLDEN = {"BF16": "3a82577b6ecaea19", "F16": "8a6ea6a1e84822a7", "F32": "086151a3ec39fc78"}
ELEMENTS = tuple(GOLDEN)
SANITIZED = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

ARM = {"NEON": "-march=armv8-a", "NEON with bfloat16": "-march=armv8.2-a+bf16+dotprod"}


def told(compiler: str, options: Sequence[str], element: str, folder: Path) -> str:
    """By the program, which fails where kernels do not agree."""
    done = kernel_program(PROGRAM, compiler, element, options, folder)()
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.decode()


def marks_of(isa: InstructionSet, element: str) -> list[pytest.MarkDecorator]:
    """All dtypes of the best set, and one of every other: the code between the two is the same for all."""
    if element == "BF16":
        return [] if isa is available_isas()[0] else [pytest.mark.slow]
    return [pytest.mark.slow] if isa is available_isas()[0] else [pytest.mark.long]


@pytest.mark.parametrize(
    ("isa", "element"),
    [
        pytest.param(isa, element, id=f"{isa.name}-{element}", marks=marks_of(isa, element))
        for isa, element in product(available_isas(), ELEMENTS)
    ],
)
def test_kernels_give_the_golden_bits(isa: InstructionSet, element: str, tmp_path: Path) -> None:
    options = ["-O1", "-DUNIVERSAL", "-Wno-psabi", *best_build(isa).options]
    assert told("gcc", options, element, tmp_path).splitlines()[1] == GOLDEN[element]


# As there.
@pytest.mark.long
@pytest.mark.parametrize(
    ("isa", "element"),
    [(isa, element) for isa in available_isas() for element in (ELEMENTS if isa is available_isas()[0] else ("BF16",))],
    ids=lambda value: getattr(value, "name", value),
)
def test_sanitizers_find_nothing(isa: InstructionSet, element: str, tmp_path: Path) -> None:
    assert told("gcc", [*SANITIZED, *best_build(isa).options], element, tmp_path).startswith("agree: ")


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
    agree, digest = told(CROSS_COMPILER, ["-O3", options, "-static"], element, tmp_path).splitlines()
    if element == "BF16" and "bf16" in options:
        assert agree == "agree: 4 lanes, products of pairs"
    else:
        assert agree == "agree: 4 lanes, products"
        assert digest == GOLDEN[element]


# A processor with AVX2 does what one with AVX-512 would, instruction by instruction; where there are the instructions
# themselves, other tests run them.
HAS_VNNI = any("-mavx512vnni" in best_build(isa).options for isa in available_isas())


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
    assert told("gcc", emulated, "BF16", tmp_path) == f"agree: 16 lanes, products\n{GOLDEN['BF16']}\n"
