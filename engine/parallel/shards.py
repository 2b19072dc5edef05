"""Which part of a model each rank has: a model of the same family with fewer heads, narrower layers and some tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from engine.attention.paged_step import ATTENTION_NAME
from engine.errors import UnsupportedModelError
from engine.models.families import FAMILIES
from engine.models.weights import check_loaded, check_shapes, safetensors_files, stored_tensors
from engine.parallel.heads import heads_of_a_rank
from engine.parallel.layers import connect_layers
from engine.parallel.ranks import Ranks

# Linear layers by their names.
_KEYS_AND_VALUES = ("k_proj", "v_proj")
_INNER = ("gate_proj", "up_proj", "down_proj")
_INPUTS = ("o_proj", "down_proj")
"""Their inputs are divided among ranks; of the others, their outputs."""
_VOCABULARY = ("embed_tokens", "lm_head")

_INNER_SIZES = ("intermediate_size", "moe_intermediate_size")


def check_divides(config: PreTrainedConfig, size: int) -> None:
    """Raises UnsupportedModelError for a model that `size` ranks cannot divide among them."""
    family, given = config.model_type, f"tensor_parallel_size is {size}"
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"{given}, must be 1 for models of type {family}: only {', '.join(FAMILIES)} models are divided among ranks"
        )
    for name in _INNER_SIZES:
        if getattr(config, name, 0) % size:
            raise UnsupportedModelError(f"{given}, must divide the model's {name}, which is {getattr(config, name)}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if size > kv_heads and (size % kv_heads or heads % size):
        raise UnsupportedModelError(
            f"{given}, must be at most the model's num_key_value_heads, which is {kv_heads}, or be a multiple of it "
            f"that divides num_attention_heads, which is {heads}"
        )


def part_of(config: PreTrainedConfig, size: int) -> PreTrainedConfig:
    """What each of `size` ranks has of the model, as the configuration of a model.

    All parts have the same sizes. What cannot be divided evenly, KV heads with their queries and tokens, is rounded up:
    the last ranks have some of zeros then.
    """
    part = copy.deepcopy(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    part.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    part.num_attention_heads, part.num_key_value_heads = heads_of_a_rank(heads, kv_heads, size)
    for name in _INNER_SIZES:
        if hasattr(config, name):
            setattr(part, name, getattr(config, name) // size)
    part.vocab_size = -(-config.vocab_size // size)
    # It may be a token of another rank.
    part.pad_token_id = None
    return part


def read_part(folder: Path, config: PreTrainedConfig, dtype: str, ranks: Ranks) -> PreTrainedModel:
    """This rank's part of the model in `folder`, which is all that is read of its weights, connected to the others.

    Raises UnsupportedModelError.
    """
    check_divides(config, ranks.size)
    files = safetensors_files(folder)
    if not files:
        raise UnsupportedModelError(f"{folder.name} holds no *.safetensors, which ranks read their parts from")
    stored = stored_tensors(files)
    family = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        check_shapes(family(config), stored)
    weights = {name: tensor for file in files for name, tensor in _read(file, config, ranks)}
    model, report = family.from_pretrained(
        None,
        config=part_of(config, ranks.size),
        state_dict=weights,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    check_loaded(folder, model, report, stored)
    connect_layers(model, config.vocab_size, ranks)
    return model


def _read(file: Path, config: PreTrainedConfig, ranks: Ranks) -> Iterator[tuple[str, torch.Tensor]]:
    part = part_of(config, ranks.size)
    queries, keys = part.num_attention_heads * part.head_dim, part.num_key_value_heads * part.head_dim
    sizes = {"q_proj": queries, "o_proj": queries, **dict.fromkeys(_KEYS_AND_VALUES, keys)}
    sizes |= dict.fromkeys(_VOCABULARY, part.vocab_size)
    with safe_open(file, framework="pt") as content:
        for name in content.keys():  # noqa: SIM118  (no mapping)
            layer, _, kind = name.rpartition(".")
            layer = layer.rpartition(".")[2]
            stored = content.get_slice(name)
            if layer in _INPUTS and kind == "bias":
                # Outputs are summed: the first rank alone adds the bias.
                yield name, stored[:] if ranks.rank == 0 else torch.zeros_like(stored[:])
                continue
            dimension = 1 if layer in _INPUTS else 0
            size = stored.get_shape()[dimension] // ranks.size if layer in _INNER else sizes.get(layer)
            # Ranks whose queries share a KV head each have it.
            shared = max(1, ranks.size // config.num_key_value_heads) if layer in _KEYS_AND_VALUES else 1
            yield name, stored[:] if size is None else _cut(stored, dimension, ranks.rank // shared * size, size)


def _cut(stored: torch.Tensor, dimension: int, first: int, size: int) -> torch.Tensor:
    """`size` outputs (dimension 0) or inputs (1) from the first on, of which those past the last are zeros."""
    last = stored.get_shape()[dimension]
    begin, end = min(first, last), min(first + size, last)
    part: torch.Tensor = stored[begin:end] if dimension == 0 else stored[:, begin:end]
    missing = list(part.shape)
    missing[dimension] = size - (end - begin)
    return torch.cat((part, part.new_zeros(missing)), dim=dimension) if missing[dimension] else part
