"""Finds the library of engine/cpu/csrc for an instruction set and a dtype: in the wheel, else compiled and kept.

A library is code that runs with the rights of whoever loads it. So the folder of those compiled here is the user's own,
nobody else may write to it, and a file whose digest is not the one that was noted is compiled again.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from spool.engine.cpu.compiler import CompilationError, Compiler, Flavour, digest, find_compiler
from spool.engine.cpu.isa import InstructionSet, best_build
from spool.engine.cpu.prebuilt import Library, prebuilt_library
from spool.engine.models.source import Progress, cache_folder


def compiled_library(isa: InstructionSet, dtype: str, universal: bool, progress: Progress) -> Library:
    """The library for `isa` and a dtype (`bfloat16`, `float16` or `float32`), compiled now if need be. A universal one
    computes the same bits as those for all other sets.

    Raises CompilationError.
    """
    try:
        flavour = Flavour(best_build(isa), dtype, universal)
        if library := prebuilt_library(flavour):
            return library
        compiler = find_compiler()
        identity = compiler.identity(flavour)
        path = private_folder(cache_folder() / "cpu-kernels") / f"{flavour.name}-{identity}.so"
        if not _is_whole(path):
            progress(f"compiling CPU kernels for {isa.name}, {dtype}", None)
            _compile(compiler, flavour, path)
        return Library(path, identity)
    except OSError as error:
        raise CompilationError(str(error)) from error


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


def _compile(compiler: Compiler, flavour: Flavour, path: Path) -> None:
    """Whole or not at all: another worker may load it at the same time."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        compiler.compile(flavour, made)
        noted = Path(scratch) / "digest"
        noted.write_text(digest(made), encoding="ascii")
        # The digest comes last: until it is there, the library does not count.
        os.replace(made, path)
        os.replace(noted, _digest_path(path))


def _is_whole(path: Path) -> bool:
    try:
        return _digest_path(path).read_text(encoding="ascii") == digest(path)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")
