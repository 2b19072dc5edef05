"""How the CPU kernels are compiled and kept, and which libraries are not loaded."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spool.engine.cpu.build import CompilationError, Library, compiled_library
from spool.engine.cpu.isa import available_isas
from spool.engine.cpu.kernels import load_cpu_kernels

FOLDER = "cpu-kernels"
# Writes the file that it is asked for, and counts its calls.
QUICK_COMPILER = """#!/bin/sh
[ "$2" = --version ] && exit 0
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
def test_a_library_that_others_may_have_written_is_not_loaded(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    build()
    assert (cache / FOLDER).stat().st_mode & 0o777 == 0o700
    (cache / FOLDER).chmod(0o770)
    with caplog.at_level(logging.WARNING):
        assert load_cpu_kernels(torch.bfloat16, lambda *_: None) is None
    assert "has mode 770, must not be writable by others" in caplog.text


def test_without_a_compiler_there_are_no_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    said: list[str] = []
    with caplog.at_level(logging.WARNING):
        assert load_cpu_kernels(torch.bfloat16, lambda text, _: said.append(text)) is None
    assert "no C compiler" in caplog.text
    assert said[-1].endswith(": install gcc")


def test_a_compiler_that_fails_is_reported(compiler: Path, cache: Path) -> None:
    compiler.write_text('#!/bin/sh\n[ "$2" = --version ] && exit 0\necho "this machine is unknown" >&2\nexit 1\n')
    with pytest.raises(CompilationError, match="this machine is unknown"):
        build()
    assert not list((cache / FOLDER).iterdir())


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
    assert gcc is not None
    assert clang is not None
    weight, rows = (torch.randn(size, 96).bfloat16() for size in (100, 13))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(*(kernels.linear(rows, kernels.to_panels(weight), None, 100) for kernels in (gcc, clang)))
