"""How engine/cpu/csrc is compiled: for a wheel by setup.py, else at the first start.

Like what it imports, free of torch and of installed packages: setup.py runs without any.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spool.engine.cpu.isa import Build

SOURCES = Path(__file__).with_name("csrc")

# Multiplications and additions are fused where the source says so, and nowhere else: bits must not rest on what a
# compiler happens to choose. Threads are those of the OpenMP library that torch has loaded.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", "-s", "-DNDEBUG")
ELEMENTS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""As the sources call a dtype."""
_COMPILE_SECONDS = 600


class CompilationError(RuntimeError):
    """There is no library; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Flavour:
    """Which library: for a build and a dtype (`bfloat16`, `float16` or `float32`). A universal one computes the same
    bits as those of all other builds."""

    build: Build
    dtype: str
    universal: bool

    @property
    def name(self) -> str:
        return f"{self.build.name}-{self.dtype}{'-universal' if self.universal else ''}"


@dataclass(frozen=True, slots=True)
class Compiler:
    command: tuple[str, ...]
    version: str

    def identity(self, flavour: Flavour) -> str:
        """Names the sources, the compiler, its options and the dtype; hexadecimal digits."""
        sources = [file.read_bytes() for file in sorted(SOURCES.iterdir())]
        conditions = (*sources, shlex.join(self._command(flavour)).encode(), self.version.encode())
        return hashlib.sha256(b"\0".join(conditions)).hexdigest()[:32]

    def preprocessed(self, flavour: Flavour) -> str:
        """The digest of what is compiled. Flavours for which options and this are the same are the same library."""
        return hashlib.sha256(_run([*self._command(flavour), "-E", *_files()]).encode()).hexdigest()

    def compile(self, flavour: Flavour, path: Path) -> None:
        _run([*self._command(flavour), "-o", str(path), *_files(), "-lm"])

    def compiles_for(self, machine: str) -> bool:
        return _run([*self.command, "-dumpmachine"]).startswith(f"{machine}-")

    def _command(self, flavour: Flavour) -> list[str]:
        options = [*FLAGS, *flavour.build.options, f"-DELEMENT_{ELEMENTS[flavour.dtype]}"]
        return [*self.command, *options, *(["-DUNIVERSAL"] if flavour.universal else [])]


def find_compiler() -> Compiler:
    """Raises CompilationError."""
    command = compiler_command()
    return Compiler(tuple(command), _run([*command, "--version"]))


def compiler_command() -> list[str]:
    """`CC`, which may hold options, else gcc, else clang. Raises CompilationError."""
    chosen = os.environ.get("CC")
    for command in [shlex.split(chosen)] if chosen else [["gcc"], ["clang"]]:
        if command and shutil.which(command[0]):
            return command
    missing = f"program {chosen!r} (CC)" if chosen else "gcc and no clang"
    raise CompilationError(
        f"no C compiler, there is no {missing}: install gcc or clang, or a wheel that holds compiled kernels"
    )


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS).stdout
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        raise CompilationError(" ".join(str(reason).split())[:500]) from error


def _files() -> list[str]:
    return [str(path) for path in sorted(SOURCES.glob("*.c"))]
