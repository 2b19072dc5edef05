"""Command-line options that are fields of the configuration file, under the same names."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any

import typer
from typer.models import ArgumentInfo

from deploy.cli.command_options import option_fields
from deploy.config.loading import GivenValue
from deploy.config.spool_config import SpoolConfig

_KEYS = "auth.api_keys"
_KEYS_HELP = (
    "API key that clients must send; repeat for several. Other users of the machine can read command lines: "
    "auth.api_keys_env and auth.api_keys_file keep keys from them."
)

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


def takes_fields(run: Callable[..., int]) -> Callable[..., int]:
    """Gives a command the options in FIELDS; those on the command line reach `run` as its argument `given`."""
    parameters = [_parameter(name, paths[0]) for name, paths in FIELDS.items()]
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


def _parameter(name: str, path: str) -> inspect.Parameter:
    *sections, field = path.split(".")
    section = functools.reduce(getattr, sections, SpoolConfig())
    kind, declared = next((kind, option) for each, kind, option in option_fields(type(section)) if each == field)
    default = getattr(section, field)
    option: Any = copy.copy(declared or typer.Option(help=type(section).model_fields[field].description))
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
