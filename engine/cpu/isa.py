"""Instruction sets of processors: which there are, which this machine has, and which one is to be used.

Free of torch and of installed packages: setup.py reads it, and what limits torch and its libraries must be in the
environment before they are loaded.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ISA_VARIABLE = "SPOOL_CPU_ISA"
"""Environment variable: the instruction set where the settings leave the choice open."""

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Build:
    """Code for an instruction set and what some of its processors have beyond it. `needs` are names of /proc/cpuinfo,
    `options` the compiler's."""

    name: str
    needs: frozenset[str]
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """`builds`: the best first; a processor has the set if it can run one of them. `limits`: environment variables
    that keep torch's own kernels, oneDNN and MKL to the set.
    """

    name: str
    machine: str | None
    builds: tuple[Build, ...]
    limits: Mapping[str, str]


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI, _BF16, _TILES = frozenset({"avx512_vnni"}), frozenset({"avx512_bf16"}), frozenset({"amx_tile", "amx_bf16"})
_X86, _ARM = "x86_64", "aarch64"


def _limits(aten: str, onednn: str, mkl: str) -> Mapping[str, str]:
    return {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": mkl}


INSTRUCTION_SETS = {
    each.name: each
    for each in (
        InstructionSet(
            "amx",
            _X86,
            (
                Build(
                    "amx",
                    _AVX512 | _TILES | _BF16 | _VNNI,
                    ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mavx512vnni"),
                ),
            ),
            _limits("avx512", "ALL", "AVX512"),
        ),
        InstructionSet(
            "avx512",
            _X86,
            (
                Build(
                    "avx512-bf16-vnni",
                    _AVX512 | _BF16 | _VNNI,
                    ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
                ),
                Build("avx512-vnni", _AVX512 | _VNNI, ("-march=x86-64-v4", "-mavx512vnni")),
                Build("avx512", _AVX512, ("-march=x86-64-v4",)),
            ),
            _limits("avx512", "AVX512_CORE_BF16", "AVX512"),
        ),
        InstructionSet(
            "avx2",
            _X86,
            (
                Build("avx2-vnni", _AVX2 | {"avx_vnni"}, ("-march=x86-64-v3", "-mavxvnni")),
                Build("avx2", _AVX2, ("-march=x86-64-v3",)),
            ),
            _limits("avx2", "AVX2", "AVX2"),
        ),
        InstructionSet(
            "neon",
            _ARM,
            (
                Build("neon-bf16-dotprod", frozenset({"bf16", "asimddp"}), ("-march=armv8.2-a+bf16+dotprod",)),
                Build("neon-dotprod", frozenset({"asimddp"}), ("-march=armv8.2-a+dotprod",)),
                Build("neon", frozenset(), ()),
            ),
            {},
        ),
        InstructionSet("portable", None, (Build("portable", frozenset(), ()),), _limits("default", "SSE41", "SSE4_2")),
    )
}
"""By name, the fastest first."""

CPU_ISAS = (AUTO, *INSTRUCTION_SETS)
"""What a setting may say."""


def chosen_isa(setting: str) -> InstructionSet:
    """By `setting`; where that is `auto`, by the environment; else the fastest that there is.

    Raises ValueError for a name that is unknown, or a set that this processor does not have.
    """
    limit = _limit(setting)
    available = available_isas()
    if limit is None:
        return available[0]
    if limit not in available:
        names = ", ".join(each.name for each in available)
        raise ValueError(f"the CPU instruction set {limit.name!r} is not one of this processor's, which are {names}")
    return limit


def library_limits(setting: str) -> dict[str, str]:
    """Environment variables that keep torch, oneDNN and MKL to the chosen set; none where nobody has limited it.

    The process that they are for may run on another machine. Raises ValueError for an unknown name.
    """
    isa = _limit(setting)
    if isa is None:
        return {}
    return {ISA_VARIABLE: isa.name, **isa.limits}


@cache
def available_isas() -> tuple[InstructionSet, ...]:
    """Those of this processor, the fastest first."""
    features = _features()
    return tuple(isa for isa in _of_machine(this_machine()) if any(build.needs <= features for build in isa.builds))


def builds_for(machine: str) -> tuple[Build, ...]:
    """All that its processors may run, of the fastest set first."""
    return tuple(build for isa in _of_machine(machine) for build in isa.builds)


def best_build(isa: InstructionSet) -> Build:
    """The best one that this processor can run, which must have the set."""
    features = _features()
    return next(build for build in isa.builds if build.needs <= features)


def this_machine() -> str:
    """As `uname` calls it on Linux: x86_64, aarch64."""
    machine = platform.machine().lower()
    return {"amd64": _X86, "arm64": _ARM}.get(machine, machine)


def processor_name() -> str:
    """What this machine's processor is called. Two machines of one name compute alike, with the same instructions."""
    identity = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")
    lines = _processor_lines()
    return " ".join(sorted({line for line in lines if line.split("\t")[0].strip() in identity})) or platform.processor()


def _limit(setting: str) -> InstructionSet | None:
    name = "cpu_isa"
    if setting == AUTO:
        name, setting = ISA_VARIABLE, os.environ.get(ISA_VARIABLE) or AUTO
    if setting not in CPU_ISAS:
        raise ValueError(f"{name} is {setting!r}, must be one of {', '.join(CPU_ISAS)}")
    return INSTRUCTION_SETS.get(setting)


def _of_machine(machine: str) -> list[InstructionSet]:
    return [isa for isa in INSTRUCTION_SETS.values() if isa.machine in (None, machine)]


@cache
def _features() -> frozenset[str]:
    for line in _processor_lines():
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(words.split())
    return frozenset()


@cache
def _processor_lines() -> tuple[str, ...]:
    try:
        return tuple(Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
    except OSError:
        return ()
