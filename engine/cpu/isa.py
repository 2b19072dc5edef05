"""Instruction sets of processors: which there are, which this machine has, and which one is to be used.

Free of torch: what limits torch and its libraries must be in the environment before they are loaded.
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
class InstructionSet:
    """`needs` and `takes` are names of /proc/cpuinfo: what a processor must have, and what else is used,
    with the compiler's option for it. `limits`: environment variables that keep torch's own kernels, oneDNN and MKL to
    the set.
    """

    name: str
    machine: str | None
    needs: frozenset[str]
    options: tuple[str, ...]
    takes: Mapping[str, str]
    limits: Mapping[str, str]


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AMX = _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}
_AMX_OPTIONS = ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
_VNNI = {"avx512_vnni": "-mavx512vnni"}
# The last one holds.
_ARM = {"asimddp": "-march=armv8.2-a+dotprod", "bf16": "-march=armv8.2-a+bf16+dotprod"}
_X86 = "x86_64"


def _limits(aten: str, onednn: str, mkl: str) -> Mapping[str, str]:
    return {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": mkl}


INSTRUCTION_SETS = {
    each.name: each
    for each in (
        InstructionSet("amx", _X86, _AMX, _AMX_OPTIONS, _VNNI, _limits("avx512", "ALL", "AVX512")),
        InstructionSet(
            "avx512",
            _X86,
            _AVX512,
            ("-march=x86-64-v4",),
            {"avx512_bf16": "-mavx512bf16"} | _VNNI,
            _limits("avx512", "AVX512_CORE_BF16", "AVX512"),
        ),
        InstructionSet(
            "avx2", _X86, _AVX2, ("-march=x86-64-v3",), {"avx_vnni": "-mavxvnni"}, _limits("avx2", "AVX2", "AVX2")
        ),
        InstructionSet("neon", "aarch64", frozenset(), (), _ARM, {}),
        InstructionSet("portable", None, frozenset(), (), {}, _limits("default", "SSE41", "SSE4_2")),
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
    return tuple(
        isa for isa in INSTRUCTION_SETS.values() if isa.machine in (None, _machine()) and isa.needs <= features
    )


def compiler_options(isa: InstructionSet) -> tuple[str, ...]:
    """For code that runs on this processor and uses no more than `isa`."""
    features = _features()
    return (*isa.options, *(option for feature, option in isa.takes.items() if feature in features))


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


def _machine() -> str:
    machine = platform.machine().lower()
    return {"amd64": _X86, "arm64": "aarch64"}.get(machine, machine)


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
