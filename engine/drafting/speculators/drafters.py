"""Which class computes the drafter of a folder."""

from __future__ import annotations

from pathlib import Path

from spool.engine.drafting.eagle_head import EagleHead
from spool.engine.drafting.speculators.dflash_head import DflashHead
from spool.engine.drafting.speculators.peagle_head import PeagleHead
from spool.engine.errors import UnsupportedModelError
from spool.engine.models.drafting_head import speculator_type

_CLASSES: dict[str | None, type[EagleHead | DflashHead]] = {
    **{None: EagleHead, "eagle3": EagleHead},
    **{"peagle": PeagleHead, "dflash": DflashHead},
}
"""By the type that speculators gives them."""


def drafter_class(folder: Path) -> type[EagleHead | DflashHead]:
    """Raises UnsupportedModelError for a type that is not known."""
    kind = speculator_type(folder)
    if kind not in _CLASSES:
        known = " or ".join(one for one in _CLASSES if one)
        raise UnsupportedModelError(f"{folder.name}: speculators_model_type is {kind}, must be {known}")
    return _CLASSES[kind]
