"""Weight files of a model folder, and the check that a loaded model got every weight from them.

transformers fills a weight that the files do not give with random numbers, and only logs it. So each way of loading
calls `check_loaded` before anything computes with the model.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from engine.attention.paged_step import ATTENTION_NAME
from engine.errors import UnsupportedModelError, one_line
from engine.models.drafting_head import is_of_mtp_layer

logger = logging.getLogger(__name__)

_SINGLE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")

_NAMED = 3
"""Tensors that an error names at most."""


def safetensors_files(folder: Path) -> list[Path]:
    """The files that hold the weights in `folder`; empty for a folder with pickled weights only.

    Raises UnsupportedModelError that names a file which is missing, or an index that cannot be read.
    """
    if (folder / _SINGLE_FILE).is_file():
        return [folder / _SINGLE_FILE]
    index = folder / _INDEX
    if not index.is_file():
        if any((folder / name).is_file() for name in _PICKLED_FILES):
            return []
        raise UnsupportedModelError(f"{folder.name} holds neither {_SINGLE_FILE} nor {_INDEX}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModelError(f"{folder.name}/{_INDEX} cannot be read: {one_line(error)}") from error
    for name in names:
        if not (folder / name).is_file():
            raise UnsupportedModelError(f"{folder.name}/{_INDEX} names {name}, which is not in the folder")
    return [folder / name for name in names]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What the header of a safetensors file says of a tensor; `dtype` as the format names it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """By their names. Raises UnsupportedModelError for a file that is shorter than its header says."""
    stored = {}
    for file in files:
        try:
            # Of a file that may not be read, safetensors says that it is not there.
            file.open("rb").close()
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118  (no mapping)
                    tensor = content.get_slice(name)
                    stored[name] = StoredTensor(file, tensor.get_dtype(), tuple(tensor.get_shape()))
        except (SafetensorError, OSError) as error:
            raise UnsupportedModelError(f"{file.parent.name}/{file.name} cannot be read: {one_line(error)}") from error
    return stored


def model_of(
    folder: Path,
    config: PreTrainedConfig,
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype | str,
    stored: Mapping[str, StoredTensor],
) -> PreTrainedModel:
    """A model of weights by the names of its parameters, checked as `check_loaded` does."""
    model, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    check_loaded(folder, model, report, stored)
    return model


def check_loaded(
    folder: Path, model: PreTrainedModel, report: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> None:
    """Raises UnsupportedModelError unless each weight of the model came from the folder's files, with the shape that
    config.json asks for, as floating-point numbers, all of them finite.

    `report`: what `from_pretrained` gives for `output_loading_info`, with `ignore_mismatched_sizes`.
    """
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", sys.maxsize)
    unused = sorted(name for name in report["unexpected_keys"] if not is_of_mtp_layer(name, layers))
    if report["missing_keys"]:
        holds = f"; it holds {_listed(unused)}, which config.json has no place for" if unused else ""
        raise UnsupportedModelError(f"{folder.name} holds no {_listed(report['missing_keys'])}{holds}")
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise wrong_shape(stored[name].file.name if name in stored else folder.name, name, found, expected)
    for name, reason in report.get("conversion_errors", {}).items():
        raise UnsupportedModelError(f"{folder.name}: {name} cannot be read: {' '.join(str(reason).split())}")
    for name, weights in model.named_parameters():
        file = stored[name].file if name in stored else folder
        if name in stored and not stored[name].dtype.startswith(("F", "BF")):
            raise UnsupportedModelError(f"{file.name}: {name} is of dtype {stored[name].dtype}, must be floating point")
        # One cheap pass: where a number is NaN, so are both ends.
        if weights.numel() and not torch.isfinite(torch.stack(torch.aminmax(weights.detach()))).all():
            raise UnsupportedModelError(f"{file.name}: {name} holds a value that is not a finite number")
    if unused:
        logger.warning("%s holds %d tensors that the model does not use: %s", folder.name, len(unused), _listed(unused))


def wrong_shape(file: str, name: str, found: Iterable[int], expected: Iterable[int]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{file}: {name} has the shape {list(found)}, must have {list(expected)} by config.json"
    )


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(ordered[:_NAMED]) + more
