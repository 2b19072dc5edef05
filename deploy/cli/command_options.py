"""Command-line options made from settings, or from fields of the configuration: each is declared in one place."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel, ValidationError
from typer.models import ArgumentInfo, ParameterInfo

from deploy.config.loading import GivenValue
from deploy.config.problems import limit_of
from deploy.config.spool_config import EngineSection, ServedModels, SpoolConfig
from deploy.errors import UsageError

Settings = TypeVar("Settings", bound=BaseModel)

_KEYS = "auth.api_keys"
_KEYS_HELP = (
    "API key that clients must send; repeat for several. Other users of the machine can read command lines: "
    "auth.api_keys_env and auth.api_keys_file keep keys from them."
)

# Headings in the help that differ from the section's name.
_PANELS = {"groups": "Workers", "gateway": "Server", "auth": "Server"}

FIELDS: dict[str, tuple[str, ...]] = {
    **{name: (f"models.{name}",) for name in ServedModels.model_fields},
    **{name: (f"gateway.{name}",) for name in ("host", "port", "grpc_port", "tool_format")},
    "api_key": (_KEYS,),
    **{name: (f"engine.{name}",) for name in EngineSection.model_fields},
    "target_replicas": ("groups.target.replicas",),
    "draft_replicas": ("groups.draft.replicas",),
    "threads": ("groups.target.threads", "groups.draft.threads"),
    **{name: (f"scheduling.{name}",) for name in ("policy", "batch_size", "max_running", "draft_length")},
}
"""Options of `spool serve` and the fields that each sets. An option has the name of its field; one of `groups` begins
with the group, unless it sets both, and one that is repeated to make a list is in the singular."""


def takes_settings(model: type[Settings]) -> Callable[[Callable[[Settings], int]], Callable[..., int]]:
    """Turns a function of settings into one of keyword options, as typer wants it.

    Fields annotated with a `typer.Option` or `typer.Argument` become that, others an option with their description;
    fields that are models contribute their own fields. Options have the names of their fields, which must be unique in
    the whole tree. Values that the settings reject raise `UsageError`.
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
    """Name, type and option of each field; fields that are models have no option."""
    hints = get_type_hints(model, include_extras=True)
    for name, field in model.model_fields.items():
        kind, *extras = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        option = next((extra for extra in extras if isinstance(extra, ParameterInfo)), None)
        nested = isinstance(kind, type) and issubclass(kind, BaseModel)
        yield name, kind, None if nested else option or typer.Option(help=field.description)


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


def takes_fields(run: Callable[..., int]) -> Callable[..., int]:
    """Gives a command the options in FIELDS; those on the command line reach `run` as its argument `given`."""
    parameters = [_field_parameter(name, paths[0]) for name, paths in FIELDS.items()]
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(run, eval_str=True).parameters.items()
        if name != "given"
    ]

    @functools.wraps(run)
    def command(**values: Any) -> int:
        options = {name: values.pop(name) for name in FIELDS}
        given = [
            GivenValue(
                tuple(path.split(".")),
                value.value if isinstance(value, Enum) else value,
                "MODEL" if name == "target" else f"--{name.replace('_', '-')}",
            )
            for name, value in options.items()
            if value is not None and value != []
            for path in FIELDS[name]
        ]
        return run(given=given, **values)

    command.__signature__ = inspect.Signature([*parameters, *own], return_annotation=int)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*parameters, *own)}
    return command


def _field_parameter(name: str, path: str) -> inspect.Parameter:
    *sections, field = path.split(".")
    section = functools.reduce(getattr, sections, SpoolConfig())
    kind, declared = next((kind, option) for each, kind, option in option_fields(type(section)) if each == field)
    default = getattr(section, field)
    option: Any = copy.copy(declared)
    if path == _KEYS:
        kind, default, option.help = list[str], None, _KEYS_HELP
    if not isinstance(option.show_default, str):
        shown = default.value if isinstance(default, Enum) else default
        option.show_default = False if default is None else str(shown).lower()
    if not isinstance(option, ArgumentInfo):
        option.rich_help_panel = _PANELS.get(sections[0], sections[0].capitalize())
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
