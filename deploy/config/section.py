"""The base class of all sections of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, SerializationInfo, field_serializer, model_validator


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

    @field_serializer("*", mode="wrap")
    def _secrets(self, value: Any, handler: Any, info: SerializationInfo) -> Any:
        """Secrets stay hidden in whatever is printed, and are shown in what goes to other processes (see `dump`)."""
        if info.context is not None and info.context.get("reveal"):
            if isinstance(value, SecretStr):
                return value.get_secret_value()
            if isinstance(value, tuple) and value and isinstance(value[0], SecretStr):
                return [item.get_secret_value() for item in value]
        return handler(value)

    def dump(self, *, reveal: bool = False) -> dict[str, Any]:
        """Plain data, as a file would hold it; with `reveal` secrets and all."""
        return self.model_dump(mode="json", context={"reveal": reveal})


def described(default: Any, description: str, **limits: Any) -> Any:
    """A field with its default and the one sentence that documents it."""
    return Field(default, description=description, **limits)
