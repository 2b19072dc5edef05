"""Command-line options that are fields of the configuration file, under the same names."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from typer.models import ArgumentInfo, ParameterInfo

from deploy.cli.command_options import option_fields
from deploy.config.field_documents import documents
from deploy.config.loading import GivenValue
from deploy.config.spool_config import SpoolConfig

_KEYS = "auth.api_keys"

# Headings in the help that differ from the section's name.
_PANELS = {"groups": "Workers", "gateway": "Server", "auth": "Server"}

FIELDS: dict[str, tuple[str, ...]] = {
    "target": ("models.target",),
    "draft": ("models.draft",),
    "host": ("gateway.host",),
    "port": ("gateway.port",),
    "grpc_port": ("gateway.grpc_port",),
    "api_key": (_KEYS,),
    "tool_format": ("gateway.tool_format",),
    "served_model_name": ("models.served_model_name",),
    "max_model_len": ("engine.max_model_len",),
    "gpu_memory_utilization": ("engine.gpu_memory_utilization",),
    "tensor_parallel_size": ("engine.tensor_parallel_size",),
    "target_replicas": ("groups.target.replicas",),
    "draft_replicas": ("groups.draft.replicas",),
    "threads": ("groups.target.threads", "groups.draft.threads"),
    "dtype": ("models.dtype",),
    "device": ("models.device",),
    "exact": ("models.exact",),
    "draft_lookup": ("models.draft_lookup",),
    "policy": ("scheduling.policy",),
    "batch_size": ("scheduling.batch_size",),
    "max_running": ("scheduling.max_running",),
    "draft_length": ("scheduling.draft_length",),
    "max_num_batched_tokens": ("engine.max_num_batched_tokens",),
    "page_size": ("engine.page_size",),
    "kv_pages": ("engine.kv_pages",),
    "kv_memory": ("engine.kv_memory",),
    "prefix_cache": ("engine.prefix_cache",),
    "cuda_graphs": ("engine.cuda_graphs",),
    "cpu_isa": ("engine.cpu_isa",),
}
"""Options of `spool serve` and the fields that each sets. An option has the name of its field; one of `groups` begins
with the group, unless it sets both, and one that is repeated to make a list is in the singular."""


@dataclass(frozen=True, slots=True)
class _Field:
    """What an option needs to know of a field."""

    kind: Any
    declared: ParameterInfo | None
    description: str
    default: Any


def takes_fields(run: Callable[..., int]) -> Callable[..., int]:
    """Gives a command the options in FIELDS; those on the command line reach `run` as its argument `given`."""
    parameters = [_parameter(name, paths) for name, paths in FIELDS.items()]
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(run, eval_str=True).parameters.items()
        if name != "given"
    ]

    @functools.wraps(run)
    def command(**values: Any) -> int:
        given = [value for name in FIELDS for value in _given(name, values.pop(name))]
        return run(given=given, **values)

    command.__signature__ = inspect.Signature([*parameters, *own], return_annotation=int)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*parameters, *own)}
    return command


def _given(name: str, value: Any) -> Iterator[GivenValue]:
    if value is None or value == []:
        return
    plain = value.value if isinstance(value, Enum) else value
    for path in FIELDS[name]:
        origin = "MODEL" if path == "models.target" else f"--{name.replace('_', '-')}"
        yield GivenValue(tuple(path.split(".")), plain, origin)


def _parameter(name: str, paths: tuple[str, ...]) -> inspect.Parameter:
    field = _field(paths[0])
    option: Any = copy.copy(field.declared) if field.declared is not None else typer.Option(help=field.description)
    if not isinstance(option.show_default, str):
        option.show_default = False if field.default is None else _shown(field.default)
    if not isinstance(option, ArgumentInfo):
        section = paths[0].partition(".")[0]
        option.rich_help_panel = _PANELS.get(section, section.capitalize())
    kind = field.kind
    if paths[0] == _KEYS:
        kind = list[str]
        option.show_default = False
        option.help = (
            "API key that clients must send; repeat for several. Other users of the machine can read command lines: "
            "auth.api_keys_env and auth.api_keys_file keep keys from them."
        )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _shown(default: Any) -> str:
    return str(default.value if isinstance(default, Enum) else default).lower()


def _field(path: str) -> _Field:
    *sections, name = path.split(".")
    model: type[BaseModel] = SpoolConfig
    defaults: BaseModel = SpoolConfig()
    for section in sections:
        defaults = getattr(defaults, section)
        model = type(defaults)
    kind, declared = next((kind, option) for each, kind, option in option_fields(model) if each == name)
    description = next(one.description for one in documents(model, defaults) if one.path == (name,))
    return _Field(kind, declared, description, getattr(defaults, name))
