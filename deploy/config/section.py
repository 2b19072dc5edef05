"""The base class of all sections of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    SerializationInfo,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

REVEAL = "reveal secrets"


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One thing that is wrong, at a path that counts from the section that found it."""

    path: tuple[str, ...]
    message: str
    involves: frozenset[str] = frozenset()
    """Further sections that the check read. If one of them has problems itself, this problem is not reported."""


class FieldProblemsError(ValueError):
    """What a section finds wrong beyond the types of its fields; all of it, and each at its field."""

    def __init__(self, problems: list[FieldProblem]) -> None:
        super().__init__("; ".join(f"{'.'.join(problem.path)} {problem.message}" for problem in problems))
        self.problems = problems


class Section(BaseModel):
    """Part of the configuration: frozen, and without room for fields nobody knows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def problems(self) -> Iterator[FieldProblem]:
        """What is wrong although every field by itself is right."""
        yield from ()

    @field_validator("*", mode="before")
    @classmethod
    def _check_no_bool(cls, value: Any, info: ValidationInfo) -> Any:
        """To pydantic `true` is 1."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and kind is not bool:
            raise PydanticCustomError("no_bool", "is true or false")
        return value

    @model_validator(mode="after")
    def _check_section(self) -> Self:
        problems = list(self.problems())
        if problems:
            raise FieldProblemsError(problems)
        return self

    @field_serializer("*", mode="wrap")
    def _secrets(self, value: Any, handler: Any, info: SerializationInfo) -> Any:
        """Secrets stay hidden in whatever is printed, and are shown in what goes to other processes (see `dump`)."""
        if info.context is not None and info.context.get(REVEAL):
            if isinstance(value, SecretStr):
                return value.get_secret_value()
            if isinstance(value, tuple) and value and all(isinstance(item, SecretStr) for item in value):
                return [item.get_secret_value() for item in value]
        return handler(value)

    def dump(self, *, reveal: bool = False) -> dict[str, Any]:
        """Plain data, as a file would hold it; with `reveal` secrets and all."""
        return self.model_dump(mode="json", context={REVEAL: reveal})


def described(default: Any, description: str, **limits: Any) -> Any:
    """A field with its default and the one sentence that documents it."""
    return Field(default, description=description, **limits)
