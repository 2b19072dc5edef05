"""A YAML file as plain data, with the line of every value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from deploy.config.problems import ConfigurationError, Problem


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
