"""How the CPU kernels are compiled and kept, and which libraries are not loaded."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spool.engine.cpu import prebuilt
from spool.engine.cpu.build import compiled_library
from spool.engine.cpu.compiler import CompilationError
from spool.engine.cpu.isa import available_isas
from spool.engine.cpu.kernels import load_cpu_kernels
from spool.engine.cpu.prebuilt import Library, build_libraries
from spool.engine.errors import UnsupportedProcessorError

FOLDER = "cpu-kernels"
# Writes the file that it is asked for, and counts its calls.
QUICK_COMPILER = """#!/bin/sh
case "$*" in
    *--version) exit;;
    *-dumpmachine) echo x86_64-linux-gnu; exit;;
    *-DELEMENT_BF16*" -E "*) echo "$*"; exit;;
    *" -E "*) exit;;
esac
while [ "$1" != -o ]; do shift; done
echo library > "$2"
echo >> "$(dirname "$0")/calls"
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SPOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The program that is taken for the C compiler."""
    path = tmp_path / "my tools" / "cc"
    path.parent.mkdir()
    path.write_text(QUICK_COMPILER)
    path.chmod(0o755)
    monkeypatch.setenv("CC", f"'{path}' -g0")
    return path


def build(words: list[str] | None = None) -> Library:
    said = [] if words is None else words
    return compiled_library(available_isas()[0], "bfloat16", False, lambda word, _: said.append(word))


@pytest.mark.usefixtures("compiler")
def test_a_library_is_compiled_once() -> None:
    words: list[str] = []
    assert build(words) == build(words)
    assert words == [f"compiling CPU kernels for {available_isas()[0].name}, bfloat16"]


def test_a_damaged_library_is_compiled_again(compiler: Path) -> None:
    library = build()
    whole = library.path.read_bytes()
    damages: dict[str, Callable[[], object]] = {
        "truncated": lambda: library.path.write_bytes(whole[: len(whole) // 2]),
        "changed": lambda: library.path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1])),
        "without its digest": library.path.with_suffix(".sha256").unlink,
    }
    for damage, harm in damages.items():
        harm()
        words: list[str] = []
        build(words)
        assert len(words) == 1, damage
        assert library.path.read_bytes() == whole
    assert len(compiler.with_name("calls").read_text()) == 1 + len(damages)


@pytest.mark.usefixtures("compiler")
def test_a_library_that_others_may_have_written_is_not_loaded(cache: Path) -> None:
    build()
    assert (cache / FOLDER).stat().st_mode & 0o777 == 0o700
    (cache / FOLDER).chmod(0o770)
    with pytest.raises(UnsupportedProcessorError, match="has mode 770, must not be writable by others"):
        load_cpu_kernels(torch.bfloat16, lambda *_: None)


def test_without_a_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    with pytest.raises(UnsupportedProcessorError, match="install gcc or clang, or a wheel that holds"):
        load_cpu_kernels(torch.bfloat16, lambda *_: None)


def test_a_compiler_that_fails_is_reported(compiler: Path, cache: Path) -> None:
    compiler.write_text('#!/bin/sh\n[ "$2" = --version ] && exit 0\necho "this machine is unknown" >&2\nexit 1\n')
    with pytest.raises(CompilationError, match="this machine is unknown"):
        build()
    assert not list((cache / FOLDER).iterdir())


@pytest.fixture
def in_a_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of libraries beside the module."""
    monkeypatch.setattr(prebuilt, "COMPILED", tmp_path / "compiled")
    return tmp_path / "compiled"


def test_a_wheels_libraries_need_no_compiler(
    compiler: Path, cache: Path, in_a_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = build()
    shutil.rmtree(cache)
    build_libraries(in_a_wheel, "x86_64", [], lambda _: None)
    monkeypatch.setenv("CC", str(compiler.with_name("none")))
    library = build()
    assert library.path.parent == in_a_wheel
    assert library.identity == compiled.identity
    assert not cache.exists()


def test_libraries_that_turn_out_the_same_are_one_file(compiler: Path, in_a_wheel: Path) -> None:
    said: list[str] = []
    build_libraries(in_a_wheel, "x86_64", ["avx512-vnni", "portable"], said.append)
    # The compiler says what is the same: of each build, all that is not bfloat16.
    assert len(compiler.with_name("calls").read_text()) == len(said) == 6
    assert sorted(path.name for path in in_a_wheel.iterdir()) == ["avx512-vnni-bfloat16.so", prebuilt.MANIFEST]
    entries = json.loads((in_a_wheel / prebuilt.MANIFEST).read_text())
    assert len(entries) == 12
    assert {entry["file"] for entry in entries.values()} == {"avx512-vnni-bfloat16.so"}
    assert len({entry["identity"] for entry in entries.values()}) == 12


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"other"), Path.unlink], ids=["changed", "missing"])
def test_a_wheels_damaged_library_is_refused_by_name(in_a_wheel: Path, damage: Callable[[Path], object]) -> None:
    build_libraries(in_a_wheel, "x86_64", [], lambda _: None)
    path = build().path
    damage(path)
    with pytest.raises(CompilationError, match=re.escape(str(path))):
        build()


@pytest.mark.usefixtures("compiler")
def test_a_wheel_with_some_builds_leaves_the_others_to_the_compiler(in_a_wheel: Path, cache: Path) -> None:
    isa = next(isa for isa in available_isas() if isa.name != "portable")
    build_libraries(in_a_wheel, "x86_64", ["portable"], lambda _: None)
    assert compiled_library(isa, "float32", False, lambda *_: None).path.parent == cache / FOLDER


@pytest.mark.usefixtures("compiler")
def test_a_wheel_is_not_built_for_what_the_compiler_does_not_know(in_a_wheel: Path) -> None:
    with pytest.raises(CompilationError, match="does not compile for aarch64: set CC"):
        build_libraries(in_a_wheel, "aarch64", [], lambda _: None)
    with pytest.raises(CompilationError, match="no build of x86_64 is called neon; there are amx, "):
        build_libraries(in_a_wheel, "x86_64", ["neon", "portable"], lambda _: None)
    assert not in_a_wheel.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "isa",
    [pytest.param(isa.name, marks=[] if isa is available_isas()[0] else pytest.mark.long) for isa in available_isas()],
)
def test_clang_compiles_what_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    if shutil.which("clang") is None:
        pytest.skip("no clang")
    gcc = load_cpu_kernels(torch.bfloat16, lambda *_: None, isa)
    monkeypatch.setenv("CC", "clang")
    clang = load_cpu_kernels(torch.bfloat16, lambda *_: None, isa)
    weight, rows = (torch.randn(size, 96).bfloat16() for size in (100, 13))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(*(kernels.linear(rows, kernels.to_panels(weight), None, 100) for kernels in (gcc, clang)))
