"""What pyproject.toml and the lock files promise: ranges, exact versions, and every package found."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.dependencies import DEV_LOCK, LOCK, PYPROJECT, ROOT, installed_closure, locked, requirements

PROJECT = PYPROJECT["project"]
RUNTIME = requirements(PROJECT["dependencies"])
DEV = requirements(PROJECT["optional-dependencies"]["dev"])
BUILD = requirements(PYPROJECT["build-system"]["requires"])
# What torch's builds with CUDA bring along, each its own exact versions.
CUDA = re.compile(r"nvidia-|cuda-|triton$")


def operators(requirement: Requirement) -> list[str]:
    return sorted(clause.operator for clause in requirement.specifier)


def test_runtime_dependencies_are_ranges() -> None:
    assert len(RUNTIME) > 20
    pinned = [requirement.name for requirement in RUNTIME if operators(requirement) == ["=="]]
    assert pinned == ["ray"]
    rest = [requirement for requirement in [*RUNTIME, *BUILD] if requirement.name not in pinned]
    assert [str(requirement) for requirement in rest if operators(requirement) != ["<", ">="]] == []


def test_development_tools_are_pinned() -> None:
    loose = [str(requirement) for requirement in DEV if operators(requirement) != ["=="] or "*" in str(requirement)]
    assert loose == []


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


def test_nothing_for_tests_alone_is_installed_for_serving() -> None:
    needed = {canonicalize_name(requirement.name) for requirement in RUNTIME}
    closure = installed_closure(RUNTIME)
    tools = {canonicalize_name(requirement.name) for requirement in DEV} - needed - set(closure)
    assert {"mypy", "pytest", "selenium"} <= tools
    assert [name for name in locked(LOCK) if name in tools] == []


def test_lock_files_name_no_place() -> None:
    for lock in (LOCK, DEV_LOCK):
        assert re.search(r"://|--|@|/", lock.read_text(encoding="utf-8")) is None


def test_torch_needs_what_the_lock_was_resolved_with() -> None:
    (metadata,) = PYPROJECT["tool"]["uv"]["dependency-metadata"]
    assert metadata["name"] == "torch"
    said = {canonicalize_name(requirement.name) for requirement in requirements(metadata["requires-dist"])}
    torch = installed_closure([Requirement("torch")])["torch"]
    own = [each for each in requirements(torch.requires or []) if each.marker is None or each.marker.evaluate()]
    assert said == {name for each in own if not CUDA.match(name := canonicalize_name(each.name))}


def test_the_client_alone_has_the_versions_of_the_whole() -> None:
    alone = tomllib.loads((ROOT / "spool_client" / "pyproject.toml").read_text(encoding="utf-8"))
    project = alone["project"]
    assert alone["build-system"] == PYPROJECT["build-system"]
    assert all(project[name] == PROJECT[name] for name in ("version", "license", "requires-python"))
    assert {Requirement(line).name for line in project["dependencies"]} == {"grpcio", "protobuf"}
    assert set(project["dependencies"]) <= set(PROJECT["dependencies"])
    folders = {source.parent.relative_to(ROOT).as_posix() for source in (ROOT / "spool_client").rglob("*.py")}
    assert {package.replace(".", "/") for package in alone["tool"]["setuptools"]["packages"]} == folders


def test_every_package_is_found() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = [pattern.removesuffix("*") for pattern in patterns]
    assert folders == ["protos", "spool_client", "scheduler", "engine", "services", "deploy", "bench"]
    bare = [
        str(source.parent.relative_to(ROOT))
        for folder in folders
        for source in (ROOT / folder).rglob("*.py")
        if not (source.parent / "__init__.py").exists() and source.name != "sitecustomize.py"
    ]
    assert bare == []
