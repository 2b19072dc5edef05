"""Reads YAML without losing where each value stood."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from deploy.config.problems import ConfigurationError, Problem

_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class YamlSource:
    """The plain data of one YAML document, and the line of every value in it.

    Raises ConfigurationError for a file that cannot be read, is not YAML, holds no mapping or a field twice.
    """

    def __init__(self, path: Path) -> None:
        self._name = str(path)
        self._lines: dict[tuple[str, ...], int] = {}
        self._problems: list[Problem] = []
        self._above: list[yaml.Node] = []
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigurationError([Problem(self._name, "", f"cannot be read: {error.strerror}")]) from error
        try:
            self.data = self._read(content)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark is not None else 0
            what = " ".join(part for part in (error.context, error.problem) if part)
            raise ConfigurationError([Problem(self._at(line), "", f"not YAML: {what}")]) from error
        except yaml.YAMLError as error:
            what = " ".join(str(error).split())
            raise ConfigurationError([Problem(self._name, "", f"not YAML: {what}")]) from error
        except RecursionError as error:
            raise ConfigurationError([Problem(self._name, "", "is nested too deeply")]) from error
        if self._problems:
            raise ConfigurationError(self._problems)

    def line(self, path: tuple[str, ...]) -> int:
        """The line of the value at `path`, or of the section that it is missing from."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def _read(self, content: bytes) -> dict[str, Any]:
        loader = yaml.SafeLoader(content)
        try:
            node = loader.get_single_node()
            if node is None:
                return {}
            if not isinstance(node, yaml.MappingNode):
                self._complain(node, (), "holds no `section:` lines, must begin with one")
                return {}
            data: dict[str, Any] = self._mapping(loader, node, ())
            return data
        finally:
            loader.dispose()

    def _mapping(self, loader: yaml.SafeLoader, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Any]:
        own = [key.value for key, _ in node.value]
        loader.flatten_mapping(node)
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or isinstance(key, (dict, list, tuple)):
                self._complain(key_node, path, "holds a field whose name is no text")
                continue
            name = str(key)
            below = (*path, name)
            if name in data and own.count(key_node.value) > 1:
                self._complain(key_node, below, f"is there twice, first in line {self._lines[below]}")
            self._lines[below] = key_node.start_mark.line + 1
            data[name] = self._value(loader, value_node, below)
        return data

    def _value(self, loader: yaml.SafeLoader, node: yaml.Node, path: tuple[str, ...]) -> Any:
        if any(node is above for above in self._above):
            self._problems.append(Problem(self._at(self._lines[path]), ".".join(path), "holds itself"))
            return None
        if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN_TAGS:
            self._complain(node, path, f"has the tag {node.tag}, must be plain")
            return None
        self._above.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(loader, node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self._item(loader, item, (*path, str(index))) for index, item in enumerate(node.value)]
            return loader.construct_object(node, deep=True)
        finally:
            self._above.pop()

    def _item(self, loader: yaml.SafeLoader, node: yaml.Node, path: tuple[str, ...]) -> Any:
        self._lines[path] = node.start_mark.line + 1
        return self._value(loader, node, path)

    def _complain(self, node: yaml.Node, path: tuple[str, ...], message: str) -> None:
        self._problems.append(Problem(self._at(node.start_mark.line + 1), ".".join(path), message))

    def _at(self, line: int) -> str:
        return f"{self._name}:{line}"
