"""Every dependency in pyproject.toml is pinned to one version."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


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
