"""Which instruction set is used, and what keeps other libraries to it."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from spool.engine.cpu.isa import (
    CPU_ISAS,
    INSTRUCTION_SETS,
    ISA_VARIABLE,
    InstructionSet,
    available_isas,
    best_build,
    builds_for,
    chosen_isa,
    library_limits,
)

AVAILABLE = [isa.name for isa in available_isas()]


@pytest.fixture(autouse=True)
def _no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)


def test_the_fastest_is_chosen() -> None:
    assert chosen_isa("auto") == available_isas()[0]
    assert AVAILABLE[-1] == "portable"
    assert library_limits("auto") == {}


@pytest.mark.parametrize("name", AVAILABLE)
def test_settings_and_environment_limit_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert chosen_isa(name).name == name
    monkeypatch.setenv(ISA_VARIABLE, name)
    assert chosen_isa("auto").name == name
    assert chosen_isa("portable").name == "portable"  # what the settings say comes first
    assert library_limits("auto")[ISA_VARIABLE] == name


def test_torch_and_its_libraries_are_limited_as_well() -> None:
    assert library_limits("avx2") == {
        ISA_VARIABLE: "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }


def test_an_unknown_name_and_a_set_of_another_processor_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cpu_isa is 'sse9', must be one of auto, amx, avx512, avx2, neon, portable"):
        chosen_isa("sse9")
    for absent in set(CPU_ISAS) - {"auto", *AVAILABLE}:
        with pytest.raises(ValueError, match=f"{absent!r} is not one of this processor's"):
            chosen_isa(absent)
    monkeypatch.setenv(ISA_VARIABLE, "sse9")
    with pytest.raises(ValueError, match=f"{ISA_VARIABLE} is 'sse9', must be one of"):
        library_limits("auto")


@pytest.mark.parametrize("isa", INSTRUCTION_SETS.values(), ids=lambda isa: isa.name)
def test_a_better_build_needs_more(isa: InstructionSet) -> None:
    for better, worse in pairwise(isa.builds):
        assert better.needs > worse.needs
    assert len({build.options for build in isa.builds}) == len(isa.builds)


@pytest.mark.parametrize("isa", available_isas(), ids=lambda isa: isa.name)
def test_the_best_build_is_chosen_of_those_that_the_processor_can_run(isa: InstructionSet) -> None:
    words = set(Path("/proc/cpuinfo").read_text().split())
    assert best_build(isa) == next(build for build in isa.builds if build.needs <= words)


def test_a_machine_has_builds_with_names_of_their_own() -> None:
    assert [build.name for build in builds_for("aarch64")] == ["neon-bf16-dotprod", "neon-dotprod", "neon", "portable"]
    names = [build.name for build in builds_for("x86_64")]
    assert len(names) == len(set(names)) == 7
    assert all(re.fullmatch("[a-z0-9-]+", name) for name in names)
