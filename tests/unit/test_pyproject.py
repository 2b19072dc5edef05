"""What pyproject.toml and the lock files promise: ranges, exact versions, and every package found."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.dependencies import DEV_LOCK, LOCK, PYPROJECT, ROOT, installed_closure, locked, requirements

PROJECT = PYPROJECT["project"]
RUNTIME = [each for each in requirements(PROJECT["dependencies"]) if each.name != "spool-client"]
DEV = requirements(PROJECT["optional-dependencies"]["dev"])
BUILD = requirements(PYPROJECT["build-system"]["requires"])
# What torch's builds with CUDA bring along, each its own exact versions.
CUDA = re.compile(r"nvidia-|cuda-|triton$")


def test_every_range_admits_the_locked_version() -> None:
    versions = locked(DEV_LOCK)
    outside = [
        f"{requirement} is locked as {versions.get(canonicalize_name(requirement.name))}"
        for requirement in [*RUNTIME, *DEV, *BUILD]
        if not requirement.specifier.contains(versions.get(canonicalize_name(requirement.name), "0"))
    ]
    assert outside == []


def test_both_lock_files_name_the_same_versions() -> None:
    assert locked(LOCK).items() <= locked(DEV_LOCK).items()


@pytest.mark.parametrize(("wanted", "lock"), [(RUNTIME, LOCK), ([*RUNTIME, *DEV], DEV_LOCK)], ids=["serving", "dev"])
def test_all_that_is_needed_is_locked(wanted: list[Requirement], lock: Path) -> None:
    closure = installed_closure([each for each in wanted if each.marker is None or each.marker.evaluate()])
    assert len(closure) > len(wanted)
    versions = locked(lock)
    assert [name for name in closure if name not in versions and not CUDA.match(name)] == []


def test_the_client_alone_has_the_versions_of_the_whole() -> None:
    alone = tomllib.loads((ROOT / "spool_client" / "pyproject.toml").read_text(encoding="utf-8"))
    project = alone["project"]
    assert alone["build-system"] == PYPROJECT["build-system"]
    assert all(project[name] == PROJECT[name] for name in ("version", "license", "requires-python"))
    assert {Requirement(line).name for line in project["dependencies"]} == {"grpcio", "protobuf"}
    assert {*project["dependencies"], f"spool-client=={project['version']}"} <= set(PROJECT["dependencies"])
    folders = {source.parent.relative_to(ROOT).as_posix() for source in (ROOT / "spool_client").rglob("__init__.py")}
    packages = alone["tool"]["setuptools"]["packages"]
    assert {package.replace("spool.client", "spool_client").replace(".", "/") for package in packages} == folders
