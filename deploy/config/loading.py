"""From a file and overrides to a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deploy.config.problems import ConfigurationError, Problem, problems_of
from deploy.config.reference import documents
from deploy.config.spool_config import SpoolConfig


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
    source = YamlFile(file) if file is not None else None
    data = source.data if source is not None else {}
    given = [*(parse_override(override) for override in overrides), *given]
    for option in given:
        _put(data, option.path, option.value)

    def origin(path: tuple[str, ...]) -> str:
        for option in given:
            shorter = min(len(path), len(option.path))
            if path[:shorter] == option.path[:shorter]:
                return option.origin
        return f"{file}:{source.line(path)}" if source is not None else ""

    try:
        return SpoolConfig.model_validate(data)
    except ValidationError as error:
        found = list(problems_of(error, [document.name for document in documents()]))
    if source is not None:
        found.sort(key=lambda problem: source.line(problem[0]))
    raise ConfigurationError([Problem(origin(path), ".".join(path), message) for path, message in found])


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


def _put(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Sets one value, making the sections above it; what stands there and is no section is replaced."""
    for name in path[:-1]:
        below = data.get(name)
        if not isinstance(below, dict):
            below = data[name] = {}
        data = below
    data[path[-1]] = value


class YamlFile:
    """Raises ConfigurationError for a file that cannot be read, is not YAML, holds no mapping or a field twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[tuple[str, ...], int] = {}
        self._problems: list[Problem] = []
        self._seen: set[int] = set()
        try:
            content = path.read_bytes()
            node = yaml.compose(content, yaml.SafeLoader)
            self.data: dict[str, Any] = yaml.safe_load(content) or {}
        except OSError as error:
            raise ConfigurationError([Problem(str(path), "", f"cannot be read: {error.strerror}")]) from error
        except (yaml.YAMLError, RecursionError) as error:
            message = " ".join(str(error).split()).replace(' in "<byte string>",', ",")
            raise ConfigurationError([Problem(str(path), "", f"not YAML: {message}")]) from error
        if not isinstance(self.data, dict):
            raise ConfigurationError([Problem(str(path), "", "holds no `section:` lines, must begin with one")])
        if node is not None:
            self._walk(node, ())
        if self._problems:
            raise ConfigurationError(self._problems)

    def line(self, path: tuple[str, ...]) -> int:
        """The line of the value at `path`, or of the section that it is missing from."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def _walk(self, node: yaml.Node, path: tuple[str, ...]) -> None:
        if id(node) in self._seen:  # an alias, which may stand inside its own anchor
            return
        self._seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                below, line = (*path, str(key.value)), key.start_mark.line + 1
                if below in self._lines and key.value != "<<":
                    message = f"is there twice, first in line {self._lines[below]}"
                    self._problems.append(Problem(f"{self._path}:{line}", ".".join(below), message))
                self._lines[below] = line
                self._walk(value, below)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._lines[(*path, str(index))] = item.start_mark.line + 1
                self._walk(item, (*path, str(index)))
