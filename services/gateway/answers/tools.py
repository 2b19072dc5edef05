"""The functions that a model may call, as a request defines them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spool.scheduler.sampling import MAX_GRAMMAR_BYTES
from spool.services.gateway.answers.schema_form import schema_fault, value_types
from spool.services.gateway.errors import invalid

MOST_TOOLS = 128
"""That a request defines."""

_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters` is a JSON schema; None: the function takes none. `strict`: the arguments of all calls fit it."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """With all three fields: some templates fail without one."""
        parameters = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        function = {"name": self.name, "description": self.description or "", "parameters": parameters}
        return {"type": "function", "function": function}

    def schema(self) -> dict[str, Any]:
        """The schema of the arguments, which are an object even if `parameters` does not say so."""
        return _NOTHING if self.parameters is None else {**self.parameters, "type": "object"}

    def argument_types(self, name: str) -> frozenset[str]:
        """The JSON types that an argument may have."""
        schema = self.schema()
        further = schema.get("additionalProperties", True)
        return value_types(schema, schema.get("properties", {}).get(name, further))


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What an answer may do with `tools`: call any or none of them; with `required`, make at least one call; with
    `name`, make one call of this function. Unless `parallel`, it has at most one call. Tools that are not `offered`
    are only checked."""

    tools: tuple[Tool, ...]
    required: bool = False
    name: str | None = None
    parallel: bool = True
    offered: bool = True

    @property
    def constrained(self) -> bool:
        return self.required or self.name is not None

    @property
    def strict(self) -> bool:
        return any(tool.strict for tool in self.tools)

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return self.tools if self.name is None else tuple(tool for tool in self.tools if tool.name == self.name)


def check_tools(use: ToolUse) -> None:
    """Raises RequestError that names the field at fault."""
    if not 1 <= len(use.tools) <= MOST_TOOLS:
        raise invalid(f"tools has {len(use.tools)} entries, must have between 1 and {MOST_TOOLS}", "tools")
    names = [tool.name for tool in use.tools]
    for index, tool in enumerate(use.tools):
        field = f"tools.{index}.function"
        first = names.index(tool.name)
        if first < index:
            raise invalid(
                f"{field}.name is {tool.name!r}, which is that of tools.{first}, must differ", f"{field}.name"
            )
        if tool.parameters is not None:
            _check_parameters(f"{field}.parameters", tool.parameters)
    if use.name is not None and use.name not in names:
        raise invalid(f"tool_choice names {use.name!r}, must be one of the tools: {', '.join(names)}", "tool_choice")


def _check_parameters(field: str, schema: Mapping[str, Any]) -> None:
    size = len(json.dumps(schema))
    if size > MAX_GRAMMAR_BYTES:
        raise invalid(f"{field} has {size} bytes, must have at most {MAX_GRAMMAR_BYTES}", field)
    if schema.get("type", "object") != "object":
        raise invalid(f"{field}.type is {schema['type']!r}, must be 'object'", field)
    fault = schema_fault(schema)
    if fault is not None:
        raise invalid(f"{field} is no JSON schema: {fault}", field)
