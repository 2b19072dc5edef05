"""Problems of a configuration, in words for the person who has to fix them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from deploy.config.field_documents import section_at
from deploy.config.section import FieldProblem, FieldProblemsError
from deploy.errors import UsageError

Path = tuple[str, ...]

# Messages of our own checks begin with the field: "batch_size is 0, must be at least 1".
_BEGINS_WITH_FIELD = re.compile(r"([a-z_]+) (is .*)", re.DOTALL)
_LONGEST_VALUE = 80

RENAMED_FIELDS: dict[str, str] = {
    "scheduling.window": "scheduling.max_running",
    "engine.max_packed_rows": "engine.max_num_batched_tokens",
    "gateway.http_port": "gateway.port",
    "models.served_name": "models.served_model_name",
}
"""Fields of earlier versions and their present names, as full paths."""

_MUST_BE: dict[str, str] = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "finite",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "no_bool": "a number or text, not true or false",
    "string_type": "text (in quotes where it looks like something else)",
    "path_type": "the path of a file or folder",
    "enum": "{expected}",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "byte_size": "a size such as 512MiB or 2GiB",
    "byte_size_unit": "a size such as 512MiB or 2GiB",
    "tuple_type": "a list",
    "dict_type": "a section of `name: value` lines",
    "model_type": "a section of `field: value` lines",
    "model_attributes_type": "a section of `field: value` lines",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where it was read, at which field, and what."""

    origin: str
    path: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin, f"{self.path} {self.message}".strip()) if part)


class ConfigurationError(UsageError):
    """A configuration that cannot be used. Its text is the first problem and the number of the others."""

    def __init__(self, problems: list[Problem]) -> None:
        more = f" (and {len(problems) - 1} more, which `spool config check` lists)" if len(problems) > 1 else ""
        super().__init__(f"{problems[0]}{more}")
        self.problems = problems


def problems_of(data: Mapping[str, Any], model: type[BaseModel], error: ValidationError) -> list[FieldProblem]:
    """All that is wrong with `data`, of which pydantic has found `error`."""
    found = [problem for details in error.errors() for problem in _found(details, model)]
    wrong = {problem.path[0] for problem in found if problem.path}
    # Checks that compare sections ran only if each section was right by itself: let those see the right ones.
    right = {name: value for name, value in data.items() if name not in wrong}
    if len(right) == len(data):
        return found
    try:
        model.model_validate(right)
    except ValidationError as second:
        more = [problem for details in second.errors() for problem in _found(details, model)]
        found += [problem for problem in more if wrong.isdisjoint({problem.path[0], *problem.involves})]
    return found


def _found(details: ErrorDetails, model: type[BaseModel]) -> Iterator[FieldProblem]:
    path = tuple(str(part) for part in details["loc"] if part != "[key]")
    context: Mapping[str, Any] = details.get("ctx", {})
    kind, value = details["type"], details["input"]
    cause = context.get("error")
    if isinstance(cause, FieldProblemsError):
        for problem in cause.problems:
            yield FieldProblem(path + problem.path, problem.message, problem.involves)
    elif kind == "value_error":
        yield FieldProblem(*_own(path, str(cause)))
    elif kind == "missing":
        yield FieldProblem(path, "is missing")
    elif kind == "extra_forbidden":
        yield FieldProblem(path, _unknown(path, model))
    elif kind == "string_too_short":
        yield FieldProblem(path, "is empty, must not be")
    elif kind in _MUST_BE:
        yield FieldProblem(path, f"is {_shown(value)}, must be {_MUST_BE[kind].format(**context)}")
    else:
        yield FieldProblem(path, f"is {_shown(value)}: {details['msg'][:1].lower()}{details['msg'][1:]}")


def _own(path: Path, message: str) -> tuple[Path, str]:
    match = _BEGINS_WITH_FIELD.fullmatch(message)
    if match is None:
        return path, message
    return (path if path[-1:] == (match[1],) else (*path, match[1])), match[2]


def _unknown(path: Path, model: type[BaseModel]) -> str:
    renamed = RENAMED_FIELDS.get(".".join(path))
    if renamed is not None:
        return f"is now {renamed}"
    section = section_at(model, path[:-1])
    near = difflib.get_close_matches(path[-1], section.model_fields, n=1) if section is not None else []
    return f"is no field of Spool{f'; did you mean {near[0]}?' if near else ''}"


def _shown(value: object) -> str:
    if isinstance(value, SecretStr):
        return "a secret"
    if isinstance(value, Mapping):
        return "a section"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
