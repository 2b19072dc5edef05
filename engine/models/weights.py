"""Weight files of a model folder, and the check that a loaded model got every weight from them.

transformers fills a weight that the files do not give with random numbers, leaves out a tensor that the model has no
place for, and only logs both. So each way of loading calls `check_loaded` before anything computes with the model:
every tensor of a folder is used, known to change nothing, or refused by its name.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from spool.engine.attention.paged_step import ATTENTION_NAME
from spool.engine.errors import UnsupportedModelError, one_line
from spool.engine.leftovers import changes_nothing, listed, refuse_unused
from spool.engine.models.drafting_head import mtp_tensors

logger = logging.getLogger(__name__)

_SINGLE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_PICKLED_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")

PLAIN_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""dtypes of numbers that are what a model computes with, by the names that safetensors has for them: any other needs a
scale, or is no number."""


def safetensors_files(folder: Path) -> list[Path]:
    """The files that hold the weights in `folder`; empty for a folder with pickled weights only.

    Raises UnsupportedModelError that names a file which is missing, an index that cannot be read, or an adapter.
    """
    for name in _ADAPTERS:
        if (folder / name).is_file():
            raise UnsupportedModelError(f"{folder.name} holds {name}, which is not applied: merge it into the weights")
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
    """By their names. Raises UnsupportedModelError for a file that is shorter than its header says, and for a tensor
    that two files hold."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        try:
            # Of a file that may not be read, safetensors says that it is not there.
            file.open("rb").close()
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118  (no mapping)
                    tensor = content.get_slice(name)
                    if name in stored:
                        raise UnsupportedModelError(f"{stored[name].file.name} and {file.name} both hold {name}")
                    stored[name] = StoredTensor(file, tensor.get_dtype(), tuple(tensor.get_shape()))
        except (SafetensorError, OSError) as error:
            raise UnsupportedModelError(f"{file.parent.name}/{file.name} cannot be read: {one_line(error)}") from error
    return stored


def pickled_tensors(folder: Path) -> dict[str, StoredTensor]:
    """As `stored_tensors`, of a folder's pickled weights, whose numbers are not read. Raises UnsupportedModelError."""
    names = {dtype: name for name, dtype in PLAIN_FLOATS.items()}
    stored = {}
    for file in sorted(folder.glob("pytorch_model*.bin")):
        try:
            tensors = torch.load(file, map_location="meta", weights_only=True)
        # Damaged ones.
        except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError) as error:
            raise UnsupportedModelError(f"transformers cannot load {folder.name}: {one_line(error)}") from error
        for name, tensor in tensors.items():
            dtype = names.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
            stored[name] = StoredTensor(file, dtype, tuple(tensor.shape))
    return stored


def model_of(
    folder: Path,
    config: PreTrainedConfig,
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype | str,
    stored: Mapping[str, StoredTensor],
    ignored: Sequence[str] = (),
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
    _refuse_twice(folder, model, weights.keys())
    check_loaded(folder, model, report, stored, ignored)
    return model


def check_loaded(
    folder: Path,
    model: PreTrainedModel,
    report: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    ignored: Sequence[str] = (),
) -> None:
    """Raises UnsupportedModelError unless each weight of the model came from the folder's files, with the shape that
    config.json asks for, as floating-point numbers, all of them finite, and each tensor of the files is used or known
    to change nothing, or one of `ignored`.

    `report`: what `from_pretrained` gives for `output_loading_info`, with `ignore_mismatched_sizes`.
    """
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", sys.maxsize)
    unexpected = report["unexpected_keys"]
    unused = [name for name in unexpected - mtp_tensors(unexpected, layers) if not changes_nothing(name)]
    if report["missing_keys"]:
        holds = f"; it holds {listed(unused)}, which config.json has no place for" if unused else ""
        raise UnsupportedModelError(f"{folder.name} holds no {listed(report['missing_keys'])}{holds}")
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise wrong_shape(stored[name].file.name if name in stored else folder.name, name, found, expected)
    for name, reason in report.get("conversion_errors", {}).items():
        raise UnsupportedModelError(f"{folder.name}: {name} cannot be read: {' '.join(str(reason).split())}")
    _refuse_twice(folder, model, stored.keys())
    of_mtp = mtp_tensors(stored.keys(), layers)
    for name, tensor in stored.items():
        known = name in unexpected or name in of_mtp or changes_nothing(name) or _is_left_out(name, model)
        if tensor.dtype not in PLAIN_FLOATS and not known:
            raise UnsupportedModelError(
                f"{tensor.file.name}: {name} is of dtype {tensor.dtype}, must be one of {', '.join(PLAIN_FLOATS)}: "
                "nothing in the folder says how its numbers are quantised"
            )
    refuse_unused(folder.name, unused, ignored)
    saved = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point())
    for name, weights in (*model.named_parameters(), *buffers):
        file = stored[name].file if name in stored else folder
        # One cheap pass: where a number is NaN, so are both ends.
        if weights.numel() and not torch.isfinite(torch.stack(torch.aminmax(weights.detach()))).all():
            raise UnsupportedModelError(f"{file.name}: {name} holds a value that is not a finite number")
    if unused:
        logger.warning("%s holds %s, which are left out as the settings say", folder.name, listed(unused))


def _refuse_twice(folder: Path, model: PreTrainedModel, names: Set[str]) -> None:
    """Raises UnsupportedModelError for two of `names` that transformers takes for one, with and without the prefix of
    models with a head."""
    prefix, places = f"{model.base_model_prefix}.", model.state_dict().keys()
    for name in sorted(names):
        bare = name.removeprefix(prefix)
        if bare != name and bare in names and not {name, bare} <= places:
            raise UnsupportedModelError(f"{folder.name} holds {name} and {bare}, which are names of one weight")


def _is_left_out(name: str, model: PreTrainedModel) -> bool:
    """Whether transformers leaves a tensor of this name out where models of this class have no place for it."""
    return any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_unexpected or ())


def wrong_shape(file: str, name: str, found: Iterable[int], expected: Iterable[int]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{file}: {name} has the shape {list(found)}, must have {list(expected)} by config.json"
    )
