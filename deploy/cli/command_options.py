"""Command-line options made from fields of the configuration, or from settings: each is declared in one place."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel, ValidationError
from typer.models import ParameterInfo

from spool.deploy.config.loading import GivenValue
from spool.deploy.config.models import EngineSection, ModelsSection
from spool.deploy.config.problems import problems_of
from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.errors import UsageError

Settings = TypeVar("Settings", bound=BaseModel)
Paths = dict[str, tuple[str, ...]]
"""Options, and the fields of the configuration that each sets. An option has the name of its field; one of `groups`
begins with the group, unless it sets both; one of keys, which is repeated to make a list, is in the singular."""

_KEYS = "auth.api_keys"
_KEYS_HELP = (
    "API key that clients must send; repeat for several. Other users of the machine can read command lines: "
    "auth.api_keys_env and auth.api_keys_file keep keys from them."
)

DECODING: Paths = {
    **{name: (f"models.{name}",) for name in ModelsSection.model_fields if name != "served_model_name"},
    **{name: (f"engine.{name}",) for name in EngineSection.model_fields},
    "target_replicas": ("groups.target.replicas",),
    "draft_replicas": ("groups.draft.replicas",),
    "threads": ("groups.target.threads", "groups.draft.threads"),
    **{name: (f"scheduling.{name}",) for name in ("batch_size", "max_running", "draft_length")},
}
"""Of all commands that decode."""

SERVING: Paths = {
    **DECODING,
    "served_model_name": ("models.served_model_name",),
    **{name: (f"gateway.{name}",) for name in ("host", "port", "grpc_port", "tool_format")},
    "api_key": (_KEYS,),
    "ssl_certfile": ("auth.tls.certificate",),
    "ssl_keyfile": ("auth.tls.key",),
    "policy": ("scheduling.policy",),
}
"""Of `spool serve`."""


def takes_options(paths: Paths | None = None) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Gives a command the options of `paths`: those on the command line reach it as its argument `given`.

    An argument annotated with a model contributes the model's fields: those annotated with a `typer.Option` or
    `typer.Argument` become that, others an option with their description. Values that the model rejects raise
    `UsageError`.
    """

    def decorate(run: Callable[..., int]) -> Callable[..., int]:
        own = [one for name, one in inspect.signature(run, eval_str=True).parameters.items() if name != "given"]
        models = {one.name: one.annotation for one in own if _is_model(one.annotation)}
        parameters = [_field_parameter(name, sets[0]) for name, sets in (paths or {}).items()]
        for one in own:
            if one.name in models:
                parameters += _parameters(models[one.name])
            else:
                parameters.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        @functools.wraps(run)
        def command(**values: Any) -> int:
            given = {} if paths is None else {"given": _given(paths, values)}
            settings = {
                name: settings_from(model, {field: values.pop(field) for field in model.model_fields})
                for name, model in models.items()
            }
            return run(**given, **settings, **values)

        signature = inspect.Signature(parameters, return_annotation=int)
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def settings_from(model: type[Settings], values: dict[str, Any]) -> Settings:
    """Builds settings from the values of options. Raises `UsageError` naming option, value and limit."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        (name, *_), message = next(problems_of(error, ()))
        raise UsageError(f"--{name.replace('_', '-')} {message}") from error


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _given(paths: Paths, values: dict[str, Any]) -> list[GivenValue]:
    """Takes the options of `paths` out of `values`."""
    options = {name: values.pop(name) for name in paths}
    return [
        GivenValue(
            tuple(path.split(".")),
            value.value if isinstance(value, Enum) else value,
            "MODEL" if name == "target" else f"--{name.replace('_', '-')}",
        )
        for name, value in options.items()
        if value is not None and value != []
        for path in paths[name]
    ]


def _options(model: type[BaseModel]) -> Iterator[tuple[str, Any, ParameterInfo]]:
    """Name, type and option of each field."""
    hints = get_type_hints(model, include_extras=True)
    for name, field in model.model_fields.items():
        kind, *extras = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        declared = next((extra for extra in extras if isinstance(extra, ParameterInfo)), typer.Option())
        option = copy.copy(declared)
        option.help = option.help or field.description
        yield name, kind, option


def _parameters(model: type[BaseModel]) -> Iterator[inspect.Parameter]:
    for name, kind, option in _options(model):
        default = model.model_fields[name].get_default(call_default_factory=True)
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )


def _field_parameter(name: str, path: str) -> inspect.Parameter:
    *sections, field = path.split(".")
    section: Any = SpoolConfig()
    for each in sections:
        annotation = type(section).model_fields[each].annotation
        # One that may be left out has no defaults.
        section = getattr(section, each) or next(kind for kind in get_args(annotation) if _is_model(kind))
    model = section if isinstance(section, type) else type(section)
    option: Any
    kind, option = next((kind, option) for each, kind, option in _options(model) if each == field)
    default = None if section is model else getattr(section, field)
    if path == _KEYS:
        kind, default, option.help, option.metavar = list[str], None, _KEYS_HELP, "KEY"
    elif get_origin(kind) is tuple:
        kind, default, option.help = list[str], None, f"{option.help} Repeat for several."
    if not isinstance(option.show_default, str):
        shown = default.value if isinstance(default, Enum) else default
        option.show_default = False if default is None else str(shown).lower()
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
