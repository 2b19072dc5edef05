"""Builds wheels, and installs them in virtual environments beside nothing but what they need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from spool.engine.cpu.isa import available_isas, best_build
from tests.support.dependencies import ROOT, installed_closure, requirements

FOLDERS = ("deploy", "engine", "protos", "scheduler", "services")
BEST = best_build(available_isas()[0]).name


def copied_sources(folder: Path) -> Path:
    """Without what earlier builds left among them."""
    copy = folder / "spool"
    for name in (*FOLDERS, "bench", "tests/support"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy)
    return copy


def built_from(sources: Path, folder: Path, *options: str, **variables: str) -> Path:
    """The wheel, which `folder` then holds."""
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    build += [*options, str(sources)]
    ended = subprocess.run(build, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (built,) = folder.glob("*.whl")
    return built


def clean_environment(wheel: Path, needed: list[str], folder: Path) -> Path:
    """A virtual environment at `folder`, with the wheel and links to what it needs."""
    install(linked_environment(needed, folder), wheel)
    return folder


def linked_environment(needed: list[str], folder: Path) -> Path:
    venv.create(folder, with_pip=False, symlinks=True)
    for distribution in installed_closure(requirements(needed)).values():
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site_packages(folder) / top).exists():
                (site_packages(folder) / top).symlink_to(distribution.locate_file(top))
    return folder


def site_packages(environment: Path) -> Path:
    paths = {"base": str(environment), "platbase": str(environment), "installed_base": str(environment)}
    return Path(sysconfig.get_path("purelib", "venv", vars=paths))


def install(environment: Path, *what: object, **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    command += ["install", "--no-deps", "--no-index", *map(str, what)]
    ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
