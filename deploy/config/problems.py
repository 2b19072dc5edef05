"""Problems of a configuration, in words for the person who has to fix them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from spool.deploy.errors import UsageError

Path = tuple[str, ...]

_LONGEST_VALUE = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where it was read, at which field, and what."""

    origin: str
    path: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin, f"{self.path} {self.message}".strip()) if part)


class ConfigurationError(UsageError):
    """A configuration that cannot be used: all that is wrong with it."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


def problems_of(error: ValidationError, names: Collection[str]) -> Iterator[tuple[Path, str]]:
    """Path and message of each problem that pydantic has found; `names` are those of all fields."""
    for details in error.errors():
        path = tuple(str(part) for part in details["loc"] if part != "[key]")
        kind, message = details["type"], details["msg"]
        if kind == "value_error":
            # Checks of Spool's own: each line begins with a field, counted from the section that was checked.
            for line in str(details["ctx"]["error"]).splitlines():
                field, _, rest = line.partition(" ")
                yield (path if path[-1:] == (field,) else (*path, *field.split("."))), rest
        elif kind == "missing":
            yield path, "is missing"
        elif kind == "extra_forbidden":
            near = difflib.get_close_matches(".".join(path), names, n=1)
            yield path, f"is no field of Spool{f'; did you mean {near[0]}?' if near else ''}"
        else:
            yield path, f"is {_shown(details['input'])}, {message.replace('Input should', 'must')}"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a section"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
