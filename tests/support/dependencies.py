"""What Spool needs to run, as pyproject.toml and the packages installed beside the tests say."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = ROOT / "requirements.lock"
DEV_LOCK = ROOT / "requirements-dev.lock"


def requirements(lines: list[str]) -> list[Requirement]:
    return [Requirement(line) for line in lines]


def locked(lock: Path) -> dict[NormalizedName, str]:
    """Versions by name, whatever the machine: one version of each package, each with hashes of its files."""
    lines = [line for line in lock.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    versions: dict[NormalizedName, str] = {}
    for entry in re.split(r"\n(?=\S)", "\n".join(lines)):
        first, *hashes = re.split(r" \\\n +", entry)
        assert hashes, f"{lock.name}: {first} has no hash"
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", one) for one in hashes), f"{lock.name}: {entry}"
        requirement = Requirement(first)
        (clause,) = requirement.specifier
        name = canonicalize_name(requirement.name)
        assert clause.operator == "==", f"{lock.name}: {requirement} is not exact"
        assert name not in versions, f"{lock.name}: {requirement} is there twice"
        versions[name] = clause.version
    return versions


def installed_closure(wanted: list[Requirement]) -> dict[NormalizedName, Distribution]:
    """The installed packages that `wanted` leads to, over their own metadata, on this machine."""
    found: dict[NormalizedName, Distribution] = {}
    seen: set[tuple[NormalizedName, str]] = set()
    todo = [(requirement, extra) for requirement in wanted for extra in ("", *requirement.extras)]
    while todo:
        requirement, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found[name] = distribution = Distribution.from_name(requirement.name)
        for needed in requirements(distribution.requires or []):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                todo += [(needed, each) for each in ("", *needed.extras)]
    return found
