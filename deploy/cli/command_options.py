"""Command-line options made from a tree of pydantic settings: each option is declared and checked in one place."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError
from typer.models import ArgumentInfo, ParameterInfo

from deploy.config.problems import limit_of
from deploy.errors import UsageError

Settings = TypeVar("Settings", bound=BaseModel)


def takes_settings(model: type[Settings]) -> Callable[[Callable[[Settings], int]], Callable[..., int]]:
    """Turns a function of settings into one of keyword options, as typer wants it.

    Fields annotated with a `typer.Option` or `typer.Argument` become that; fields that are models contribute their own
    fields. Options have the names of their fields, which must be unique in the whole tree. Values that the settings
    reject raise `UsageError`.
    """
    parameters = list(_parameters(model))

    def decorate(run: Callable[[Settings], int]) -> Callable[..., int]:
        @functools.wraps(run)
        def command(**values: Any) -> int:
            return run(settings_from(model, values))

        signature = inspect.Signature(parameters, return_annotation=int)
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def settings_from(model: type[Settings], values: dict[str, Any]) -> Settings:
    """Builds settings from flat option values. Raises `UsageError` naming option, value and limit."""
    try:
        return model.model_validate(_tree(model, values))
    except ValidationError as error:
        raise UsageError(_one_line(error)) from error


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    # Messages of our own validators name field and value already.
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    names = [str(part) for part in first["loc"] if isinstance(part, str)]
    option = "--" + names[-1].replace("_", "-") if names else "options"
    return f"{option} is {first['input']!r}, {limit_of(first['msg'])}"


def option_fields(model: type[BaseModel]) -> Iterator[tuple[str, Any, ParameterInfo | None]]:
    """Name, type and option of each field."""
    hints = get_type_hints(model, include_extras=True)
    for name in model.model_fields:
        hint = hints[name]
        if get_origin(hint) is Annotated:
            kind, *extras = get_args(hint)
            option = next((extra for extra in extras if isinstance(extra, ParameterInfo)), None)
            yield name, kind, option
        else:
            yield name, hint, None


def _parameters(model: type[BaseModel], panel: str | None = None) -> Iterator[inspect.Parameter]:
    """`panel` is the heading of the options in the help."""
    for name, kind, declared in option_fields(model):
        if declared is None:
            yield from _parameters(kind, name.capitalize())
        else:
            option = copy.copy(declared)
            option.rich_help_panel = None if isinstance(option, ArgumentInfo) else panel
            default = model.model_fields[name].get_default(call_default_factory=True)
            default = list(default) if isinstance(default, tuple) else default
            yield inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
            )


def _tree(model: type[BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: values[name] if option is not None else _tree(kind, values) for name, kind, option in option_fields(model)
    }
