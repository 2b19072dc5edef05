"""Compiles engine/cpu/csrc for an instruction set and a dtype, and keeps what it has compiled.

A library is code that runs with the rights of whoever loads it. So the folder of libraries is the user's own, nobody
else may write to it, and a file whose digest is not the one that was noted is compiled again.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spool.engine.cpu.isa import InstructionSet, compiler_options
from spool.engine.models.source import Progress, cache_folder
from spool.scheduler.errors import SpoolError

SOURCES = Path(__file__).with_name("csrc")

# Multiplications and additions are fused where the source says so, and nowhere else: bits must not rest on what a
# compiler happens to choose. Threads are those of the OpenMP library that torch has loaded.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", "-DNDEBUG")
_COMPILE_SECONDS = 120


class CompilationError(SpoolError, RuntimeError):
    """There is no library; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Library:
    """A compiled library. `identity` names its sources, the compiler, its options and the dtype; hexadecimal digits."""

    path: Path
    identity: str


def compiled_library(isa: InstructionSet, dtype: str, universal: bool, progress: Progress) -> Library:
    """The library for `isa` and a dtype (`bfloat16`, `float16` or `float32`), compiled now if need be. A universal one
    computes the same bits as those for all other sets.

    Raises CompilationError.
    """
    command = compiler_command()
    try:
        version = _run([*command, "--version"])
        options = [*FLAGS, *compiler_options(isa), f"-DELEMENT_{_ELEMENTS[dtype]}"]
        options += ["-DUNIVERSAL"] if universal else []
        sources = [file.read_bytes() for file in sorted(SOURCES.iterdir())]
        conditions = (*sources, shlex.join([*command, *options]).encode(), version.encode())
        identity = hashlib.sha256(b"\0".join(conditions)).hexdigest()[:32]
        folder = private_folder(cache_folder() / "cpu-kernels")
        path = folder / f"{isa.name}-{dtype}-{identity}.so"
        if not _is_whole(path):
            progress(f"compiling CPU kernels for {isa.name}, {dtype}", None)
            _compile([*command, *options], path)
        return Library(path, identity)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        raise CompilationError(" ".join(str(reason).split())[:500]) from error


def compiler_command() -> list[str]:
    """`CC`, which may hold options, else gcc, else clang. Raises CompilationError."""
    chosen = os.environ.get("CC")
    for command in [shlex.split(chosen)] if chosen else [["gcc"], ["clang"]]:
        if command and shutil.which(command[0]):
            return command
    missing = f"program {chosen!r} (CC)" if chosen else "gcc and no clang"
    raise CompilationError(f"no C compiler, there is no {missing}: install gcc")


def private_folder(folder: Path) -> Path:
    """`folder`, made if it is not there. Raises PermissionError if anybody else owns it or may write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to user {status.st_uid}, must belong to user {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(f"{folder} has mode {mode:o}, must not be writable by others (chmod go-w)")
    return folder


def _compile(command: Sequence[str], path: Path) -> None:
    """Whole or not at all: another worker may load it at the same time."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        _run([*command, "-o", str(made), *map(str, sorted(SOURCES.glob("*.c"))), "-lm"])
        digest = Path(scratch) / "digest"
        digest.write_text(_digest(made), encoding="ascii")
        # The digest comes last: until it is there, the library does not count.
        os.replace(made, path)
        os.replace(digest, _digest_path(path))


def _is_whole(path: Path) -> bool:
    try:
        return _digest_path(path).read_text(encoding="ascii") == _digest(path)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS).stdout


_ELEMENTS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
