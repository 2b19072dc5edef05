"""From a file and overrides to a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deploy.config.problems import ConfigurationError, Problem, problems_of
from deploy.config.spool_config import SpoolConfig
from deploy.config.yaml_source import YamlSource


@dataclass(frozen=True, slots=True)
class GivenValue:
    """The value that an option gives to the field at `path`; `origin` is the option, for messages."""

    path: tuple[str, ...]
    value: Any
    origin: str


def load_configuration(
    file: Path | None, overrides: Sequence[str] = (), given: Sequence[GivenValue] = ()
) -> SpoolConfig:
    """The configuration in `file` (None: the defaults); `path=value` overrides go over it, and `given` over these.

    Raises ConfigurationError with everything that is wrong.
    """
    source = YamlSource(file) if file is not None else None
    data = source.data if source is not None else {}
    origins: dict[tuple[str, ...], str] = {}
    problems = []
    for override in overrides:
        try:
            path, value = parse_override(override)
            _put(data, path, value)
            origins[path] = f"--set {override}"
        except ValueError as error:
            problems.append(Problem(f"--set {override}", "", str(error)))
    if problems:
        raise ConfigurationError(problems)
    for option in given:
        _put(data, option.path, option.value)
        origins[option.path] = option.origin

    try:
        return SpoolConfig.model_validate(data)
    except ValidationError as error:
        found = problems_of(data, SpoolConfig, error)
    problems = []
    if source is not None:
        found.sort(key=lambda problem: source.line(problem.path))
    for problem in found:
        origin = _overriding(problem.path, origins)
        if origin is None:
            origin = f"{file}:{source.line(problem.path)}" if source is not None else ""
        problems.append(Problem(origin, ".".join(problem.path), problem.message))
    raise ConfigurationError(problems)


def configuration_from(data: Mapping[str, Any]) -> SpoolConfig:
    """The configuration that plain data makes. Raises ConfigurationError."""
    try:
        return SpoolConfig.model_validate(data)
    except ValidationError as error:
        found = problems_of(data, SpoolConfig, error)
        raise ConfigurationError([Problem("", ".".join(one.path), one.message) for one in found]) from error


def _overriding(path: tuple[str, ...], origins: Mapping[tuple[str, ...], str]) -> str | None:
    """The override that the value at `path` is from, or a part of it."""
    for overridden, origin in origins.items():
        shorter = min(len(path), len(overridden))
        if shorter and path[:shorter] == overridden[:shorter]:
            return origin
    return None


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """`scheduling.batch_size=16` as path and value; the value is YAML. Raises ValueError."""
    name, equals, value = text.partition("=")
    path = tuple(name.strip().split("."))
    if not equals or not all(path):
        raise ValueError("must be section.field=value")
    try:
        return path, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"the value is not YAML: {' '.join(str(error).split())}") from error


def _put(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Sets one value, making the sections above it; what stands there and is no section is replaced."""
    for name in path[:-1]:
        below = data.get(name)
        if not isinstance(below, dict):
            below = data[name] = {}
        data = below
    data[path[-1]] = value
