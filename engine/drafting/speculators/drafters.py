"""Which class computes the drafter of a folder."""

from __future__ import annotations

from pathlib import Path

from spool.engine.drafting.eagle_head import EagleHead
from spool.engine.errors import UnsupportedModelError
from spool.engine.models.drafting_head import speculator_type

_CLASSES = {"eagle3": EagleHead}
"""By the type that speculators gives them."""


def drafter_class(folder: Path) -> type[EagleHead]:
    """Raises UnsupportedModelError for a type that is not known."""
    kind = speculator_type(folder)
    if kind is not None and kind not in _CLASSES:
        raise UnsupportedModelError(f"{folder.name}: speculators_model_type is {kind}, must be {' or '.join(_CLASSES)}")
    return EagleHead if kind is None else _CLASSES[kind]
