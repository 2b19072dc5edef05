"""The base class of all sections of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, SecretStr, SerializationInfo, model_validator


def _serialized(secret: SecretStr, info: SerializationInfo) -> str:
    reveal = info.context is not None and info.context.get("reveal")
    return secret.get_secret_value() if reveal else str(secret)


Secret = Annotated[SecretStr, PlainSerializer(_serialized)]
"""Hidden in whatever is printed, but not in `SpoolConfig.plain`."""


class Section(BaseModel):
    """Part of the configuration: frozen, and without room for unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def problems(self) -> Iterator[str]:
        """What is wrong although each field by itself is right; each text begins with the field's path from here."""
        yield from ()

    @model_validator(mode="after")
    def _check_section(self) -> Self:
        problems = list(self.problems())
        if problems:
            raise ValueError("\n".join(problems))
        return self


def described(default: Any, description: str, **limits: Any) -> Any:
    """A field with its default and the one sentence that documents it."""
    return Field(default, description=description, **limits)
