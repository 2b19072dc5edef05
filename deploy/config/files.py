"""Whether the files and models that a configuration names are on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from spool.deploy.config.spool_config import SpoolConfig
from spool.engine.models.drafting_head import MTP
from spool.engine.models.source import ModelNotFoundError, resolve_model
from spool.scheduler.messages import Role


def absent_files(config: SpoolConfig) -> Iterator[str]:
    """A sentence for each field that names a file that is not here, or a model that cannot be one: files need to be on
    the nodes that read them only."""
    for field, path in _files(config, ()):
        if not path.is_file():
            yield f"{field} is {path}, and there is no such file here"
    models = config.models
    named = {"target": models.target} | ({"draft": models.draft_name} if models.drafts_with_model else {})
    if models.drafts_with_head and models.draft_name != MTP:
        named["draft"] = models.draft_name
    for field, name in named.items():
        try:
            resolve_model(name, Role.TARGET)
        except ModelNotFoundError as error:
            yield f"models.{field} is {error}"


def _files(section: BaseModel, above: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    for name in type(section).model_fields:
        value, place = getattr(section, name), (*above, name)
        if isinstance(value, Path):
            yield ".".join(place), value
        elif isinstance(value, BaseModel):
            yield from _files(value, place)
