"""Folders of drafters beside the target that they are for: their configuration, tensors and tokens, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import UnpicklingError

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from spool.engine.drafting.speculators.config import DrafterConfig
from spool.engine.errors import UnsupportedModelError, one_line
from spool.engine.leftovers import refuse_unused
from spool.engine.models.compatibility import check_sizes, has_moving_rope
from spool.engine.models.dtype import EMBEDDING_SCALE
from spool.engine.models.weights import safetensors_files, wrong_shape

_PICKLED = "pytorch_model.bin"
_UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""A mask of the target's tokens, which `d2t` says as well, and what a drafter was trained towards."""
_WINDOWS = "full_attention, or of dflash with sliding_window_non_causal also sliding_attention"
_CONFIGS: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def layers_of(
    folder: Path, read: DrafterConfig, features: Callable[[], list[int]]
) -> tuple[PreTrainedConfig, list[int]]:
    """The configuration of a drafter's layers, and the `features` that it reads. Raises UnsupportedModelError."""
    try:
        config = _CONFIGS[read.family].from_dict(read.layers)
        check_sizes(config)
        return config, features()
    except (TypeError, ValueError, AttributeError, KeyError, StrictDataclassError, UnsupportedModelError) as error:
        raise UnsupportedModelError(f"{folder.name}/config.json cannot be used: {one_line(error)}") from error


def check_fits(
    folder: Path, read: DrafterConfig, config: PreTrainedConfig, model: PreTrainedModel, windows: bool = False
) -> None:
    """Raises UnsupportedModelError for layers that do not fit `model`, the target, or that are of no known kind.
    `windows`: whether they may have any."""
    target, name = model.config, folder.name
    for field, own in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if getattr(config, field) != own:
            raise UnsupportedModelError(
                f"{name} does not fit the target: {field} is {getattr(config, field)}, must be {own}"
            )
    mask = read.fields.get("mask_token_id") if read.is_speculator else None
    if mask is not None and mask >= config.vocab_size:
        raise UnsupportedModelError(f"{name}: mask_token_id is {mask}, must be below {config.vocab_size}")
    if has_moving_rope(config):
        kind = config.rope_parameters["rope_type"]
        raise UnsupportedModelError(f"{name} has positions of type {kind}, must have fixed frequencies")
    if config.num_hidden_layers != 1 and not read.is_speculator:
        raise UnsupportedModelError(f"{name} has {config.num_hidden_layers} layers, must have 1")
    known = {"full_attention", "sliding_attention"} if windows else {"full_attention"}
    if kinds := set(getattr(config, "layer_types", None) or ()) - known:
        raise UnsupportedModelError(f"{name} has layer_types {', '.join(sorted(kinds))}, must be {_WINDOWS}")


def check_embedding(folder: Path, model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError where `model`, the target, multiplies its embedding, which a drafter does not."""
    embedding = model.get_input_embeddings()
    if float(getattr(embedding, EMBEDDING_SCALE, getattr(embedding, "scale", 1.0))) != 1.0:
        raise UnsupportedModelError(
            f"{folder.name} has no embedding of its own, and {model.config.model_type} multiplies that of the target"
        )


def read_tensors(
    folder: Path, read: DrafterConfig, config: PreTrainedConfig, ignored: Sequence[str]
) -> dict[str, Tensor]:
    """All of the folder's that may change a proposal. Raises UnsupportedModelError for what cannot be read, and in the
    format of speculators for biases that are there but not in the configuration, or the other way round."""
    stored = {name: tensor for name, tensor in _stored(folder).items() if name not in _UNUSED}
    if not read.is_speculator:
        return stored
    has_bias = {".self_attn.": config.attention_bias, ".mlp.": getattr(config, "mlp_bias", False)}
    named = {
        f"{name.removesuffix('weight')}bias"
        for name in stored
        if name.endswith("_proj.weight") and any(one in name for one, wanted in has_bias.items() if wanted)
    }
    if missing := sorted(named - stored.keys()):
        raise UnsupportedModelError(f"{folder.name} holds no {missing[0]}")
    others = {name for name in stored if name.endswith(".bias")} - named
    refuse_unused(folder.name, others, ignored)
    return {name: tensor for name, tensor in stored.items() if name not in others}


def _stored(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    try:
        for file in safetensors_files(folder):
            found |= load_file(file)
        if not found:
            found = torch.load(folder / _PICKLED, map_location="cpu", weights_only=True)
    # Damaged files of either kind.
    except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError, SafetensorError) as error:
        raise UnsupportedModelError(f"the weights of {folder.name} cannot be read: {one_line(error)}") from error
    return found


def token_ids_of(folder: Path, offsets: Tensor | None, rows: int, vocabulary_size: int) -> Tensor | None:
    """Of `d2t`, which says of each column how much further the target's token is; columns past the vocabulary mean
    nothing."""
    if rows >= vocabulary_size and (offsets is None or not bool(offsets.any())):
        return None
    if offsets is None:
        raise UnsupportedModelError(f"{folder.name} holds no d2t, which {rows} of {vocabulary_size} tokens need")
    if tuple(offsets.shape) != (rows,):
        raise wrong_shape(folder.name, "d2t", offsets.shape, (rows,))
    tokens = torch.arange(rows) + offsets.to(torch.int64)
    if bool((tokens.diff() < 1).any()) or int(tokens[0]) < 0 or int(tokens[-1]) >= vocabulary_size:
        raise UnsupportedModelError(
            f"{folder.name}: d2t must name tokens of the target's {vocabulary_size}, each once and in ascending order"
        )
    return tokens
