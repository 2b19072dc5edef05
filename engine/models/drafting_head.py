"""Drafting heads by their folders: which folders hold one, and what its config.json says. Knows no torch.

A head is no model: it proposes from the hidden states of the target that it was trained with, and runs in that target's
worker. Spool takes EAGLE-3 heads (arXiv 2503.01840) in the format of SGLang, drafters in that of speculators
(engine/drafting/speculators/), and MTP layers that lie in the target's own folder (engine/drafting/mtp_head.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from spool.engine.errors import UnsupportedModelError
from spool.engine.models.source import ModelNotFoundError, resolve_model
from spool.scheduler.messages import Role

_HEAD_WORDS = ("eagle", "medusa", "mtp", "nextn", "speculator", "mlpspeculator")
"""Parts of the names of architectures that are heads."""
_EAGLE3 = "LlamaForCausalLMEagle3"
_SPECULATOR = "speculators_model_type"
"""A key that each drafter in the format of speculators has."""

_MTP = re.compile(r"(^|\.)mtp")
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_OF_JOINING_LAYER = re.compile(r"model\.layers\.(\d+)\.(enorm|hnorm|eh_proj|shared_head)\.")

MTP = "mtp"
"""Names the MTP layer of a target."""

FEATURES = 3
"""Hidden states of the target that a head of EAGLE-3 takes for each position."""


def head_architecture(folder: Path) -> str | None:
    """The architecture that config.json in `folder` names, if it is one of a head; None for a model, and without a
    config.json that can be read."""
    try:
        config = _read(folder)
        names = config.get("architectures")
    except (OSError, ValueError, AttributeError):
        return None
    name = names[0] if isinstance(names, list) and names else None
    if (speculator := config.get(_SPECULATOR)) is not None:
        return name if isinstance(name, str) else str(speculator)
    return name if isinstance(name, str) and any(word in name.lower() for word in _HEAD_WORDS) else None


def speculator_type(folder: Path) -> str | None:
    """What kind of a drafter in the format of speculators is in `folder`; None for anything else."""
    try:
        kind = _read(folder).get(_SPECULATOR)
    except (OSError, ValueError, AttributeError):
        return None
    return None if kind is None else str(kind)


def is_drafting_head(name: str) -> bool:
    """Whether `MTP`, a folder or a hub id names a head; a hub id only if the model was downloaded before."""
    if name == MTP:
        return True
    try:
        folder = resolve_model(name, Role.DRAFT).folder
    except ModelNotFoundError:
        return False
    return folder is not None and head_architecture(folder) is not None


def is_of_mtp_layer(name: str, layers: int) -> bool:
    """Whether a tensor of a checkpoint belongs to an MTP layer of a model of so many `layers`: the model has no place
    for it."""
    number = _OF_LAYER.match(name)
    return _MTP.search(name) is not None if number is None else int(number[1]) >= layers


def mtp_tensors(names: Collection[str], layers: int) -> set[str]:
    """Those of `names` that belong to an MTP layer of a model of so many `layers`. A layer behind these is one where it
    joins a token's embedding and a hidden state; any other is a layer that the configuration leaves out."""
    joining = {layer[1] for name in names if (layer := _OF_JOINING_LAYER.match(name))}
    behind = {name: _OF_LAYER.match(name) for name in names if is_of_mtp_layer(name, layers)}
    return {name for name, layer in behind.items() if layer is None or layer[1] in joining}


def read_head_config(folder: Path) -> dict[str, Any]:
    """What config.json says of an EAGLE-3 head. Raises UnsupportedModelError for anything else."""
    try:
        config = _read(folder)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{folder.name}/config.json cannot be read: {error}") from error
    if head_architecture(folder) != _EAGLE3:
        raise UnsupportedModelError(
            f"{folder.name} is of the architecture {config.get('architectures')}, a head must be {_EAGLE3}"
        )
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if config.get(name):
            raise UnsupportedModelError(f"{folder.name}: {name} is {config[name]}, must be unset for a head")
    return config


def feature_layers(
    folder: Path,
    config: Mapping[str, Any],
    layers: int,
    name: str = "eagle_aux_hidden_state_layer_ids",
    count: int | None = FEATURES,
) -> list[int]:
    """The layers of the target, of `layers`, whose inputs are the features of a head: early, middle, late. `name`: of
    the key that has them; `count`: how many there must be, if that is known.

    As in other servers: ids in `eagle_config` name layers by their outputs, those beside it by their inputs. Raises
    UnsupportedModelError where the target has no such layers.
    """
    after = 0
    found = config.get(name)
    if found is None and (inner := config.get("eagle_config")) is not None:
        found, after = inner.get(name), 1
    ids = [2, layers // 2, layers - 3] if found is None else [one + after for one in found]
    wrong = not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= layers
    if wrong or len(ids) != (count or len(ids)):
        raise UnsupportedModelError(
            f"{folder.name} takes the inputs of the layers {ids}, must be {count or 'some'} of the target's {layers} "
            "in order"
        )
    return ids


def _read(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config
