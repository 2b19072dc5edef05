"""From a file and overrides to a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from spool.deploy.config.problems import ConfigurationError, Problem, problems_of
from spool.deploy.config.reference import field_names
from spool.deploy.config.spool_config import SpoolConfig


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
    data = _read(file) if file is not None else {}
    given = [*(parse_override(override) for override in overrides), *given]
    for option in given:
        _put(data, option.path, option.value)

    def origin(path: tuple[str, ...]) -> str:
        for option in given:
            shorter = min(len(path), len(option.path))
            if path[:shorter] == option.path[:shorter]:
                return option.origin
        return "" if file is None else str(file)

    try:
        config = SpoolConfig.model_validate(data)
        found = list(_booleans_as_numbers(data, config))
    except ValidationError as error:
        found = list(problems_of(error, field_names()))
    if found:
        raise ConfigurationError([Problem(origin(path), ".".join(path), text) for path, text in found])
    return config


def configuration_from(data: Mapping[str, Any]) -> SpoolConfig:
    """The configuration that plain data makes. Raises ConfigurationError."""
    return load_configuration(None, given=[GivenValue((name,), value, "") for name, value in data.items()])


def parse_override(text: str) -> GivenValue:
    """`scheduling.batch_size=16`; the value is YAML. Raises ConfigurationError."""
    origin = f"--set {text}"
    name, equals, value = text.partition("=")
    path = tuple(name.strip().split("."))
    if not equals or not all(path):
        raise ConfigurationError([Problem(origin, "", "must be section.field=value")])
    try:
        return GivenValue(path, yaml.safe_load(value), origin)
    except yaml.YAMLError as error:
        raise ConfigurationError([Problem(origin, "", f"the value is not YAML: {error}")]) from error


def _booleans_as_numbers(given: Any, read: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Path and message of each boolean of what was given that pydantic has read as something else."""
    if isinstance(given, bool):
        if not isinstance(read, bool):
            yield path, f"is {str(given).lower()}, must be a number"
    elif isinstance(given, Mapping):
        for name, value in given.items():
            below = read.get(name) if isinstance(read, Mapping) else getattr(read, str(name), None)
            yield from _booleans_as_numbers(value, below, (*path, str(name)))
    elif isinstance(given, list | tuple) and isinstance(read, list | tuple):
        for number, (value, below) in enumerate(zip(given, read, strict=False)):
            yield from _booleans_as_numbers(value, below, (*path, str(number)))


def _put(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Sets one value, making the sections above it; what stands there and is no section is replaced."""
    for name in path[:-1]:
        below = data.get(name)
        if not isinstance(below, dict):
            below = data[name] = {}
        data = below
    data[path[-1]] = value


class _Loader(yaml.SafeLoader):
    """Refuses a field that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for number, name in enumerate(names):
            if name in names[:number] and name != "<<":
                where = node.value[number][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"{name} is there twice", where)
        return super().construct_mapping(node, deep)


def _read(file: Path) -> dict[str, Any]:
    """Raises ConfigurationError for a file that cannot be read, is not YAML, holds no mapping or a field twice."""
    try:
        data = yaml.load(file.read_bytes(), _Loader) or {}
    except OSError as error:
        raise ConfigurationError([Problem(str(file), "", f"cannot be read: {error.strerror}")]) from error
    except (yaml.YAMLError, RecursionError) as error:
        message = " ".join(str(error).split()).replace(' in "<byte string>",', ",")
        raise ConfigurationError([Problem(str(file), "", f"not YAML: {message}")]) from error
    if not isinstance(data, dict):
        raise ConfigurationError([Problem(str(file), "", "holds no `section:` lines, must begin with one")])
    return data
