"""What pyproject.toml promises: exact pins, and every package listed."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYPROJECT = ROOT / "pyproject.toml"


def test_pins_are_exact() -> None:
    settings = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    project = settings["project"]
    optional = project["optional-dependencies"].values()
    named = [settings["build-system"]["requires"], project["dependencies"], *optional]
    requirements = [Requirement(line) for lines in named for line in lines]
    assert len(requirements) > 20
    loose = [
        str(requirement)
        for requirement in requirements
        if [clause.operator for clause in requirement.specifier] != ["=="] or "*" in str(requirement.specifier)
    ]
    assert loose == []


def test_every_package_is_listed() -> None:
    listed = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = {name.split(".")[0] for name in listed}
    found = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for folder in folders
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert set(listed) == found
