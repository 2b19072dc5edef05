"""Which part of a model each rank has: a model of the same family with fewer heads, narrower layers and some tokens."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from engine.attention.paged_step import ATTENTION_NAME
from engine.errors import UnsupportedModelError
from engine.models.families import FAMILIES
from engine.parallel.layers import connect_layers
from engine.parallel.ranks import Ranks

_INDEX = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"

# Linear layers by what is divided among ranks: their outputs or their inputs.
_QUERIES = ("q_proj",)
_KEYS_AND_VALUES = ("k_proj", "v_proj")
_INNER_OUTPUTS = ("gate_proj", "up_proj")
_INPUTS = ("o_proj", "down_proj")
_VOCABULARY = ("embed_tokens", "lm_head")


def check_divides(config: PreTrainedConfig, size: int) -> None:
    """Raises UnsupportedModelError for a model that `size` ranks cannot divide among them."""
    family, given = config.model_type, f"tensor_parallel_size is {size}"
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"{given}, must be 1 for models of type {family}: only {', '.join(FAMILIES)} models are divided among ranks"
        )
    for name in ("num_attention_heads", "intermediate_size"):
        if getattr(config, name) % size:
            raise UnsupportedModelError(f"{given}, must divide the model's {name}, which is {getattr(config, name)}")
    kv_heads = config.num_key_value_heads
    if kv_heads % size and size % kv_heads:
        raise UnsupportedModelError(
            f"{given}, must divide the model's num_key_value_heads, which is {kv_heads}, or be a multiple of it"
        )


def part_of(config: PreTrainedConfig, size: int) -> PreTrainedConfig:
    """What each of `size` ranks has of the model, as the configuration of a model. All parts have the same sizes."""
    part = copy.deepcopy(config)
    part.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    part.num_attention_heads //= size
    part.num_key_value_heads = max(1, config.num_key_value_heads // size)
    part.intermediate_size //= size
    part.vocab_size = -(-config.vocab_size // size)
    # It may be a token of another rank.
    part.pad_token_id = None
    return part


def read_part(folder: Path, config: PreTrainedConfig, dtype: str, ranks: Ranks) -> PreTrainedModel:
    """This rank's part of the model in `folder`, which is all that is read of its weights, connected to the others.

    Raises UnsupportedModelError.
    """
    check_divides(config, ranks.size)
    weights = {name: tensor for file in _files(folder) for name, tensor in _read(file, config, ranks)}
    model, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None,
        config=part_of(config, ranks.size),
        state_dict=weights,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        output_loading_info=True,
    )
    if report["missing_keys"]:
        raise UnsupportedModelError(f"{folder.name} holds no {', '.join(sorted(report['missing_keys'])[:3])}")
    connect_layers(model, config.vocab_size, ranks)
    return model


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    if not (folder / _SINGLE_FILE).is_file():
        raise UnsupportedModelError(
            f"{folder.name} holds neither {_SINGLE_FILE} nor {_INDEX}, which ranks read their parts from"
        )
    return [folder / _SINGLE_FILE]


def _read(file: Path, config: PreTrainedConfig, ranks: Ranks) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, framework="pt") as content:
        for name in content.keys():  # noqa: SIM118  (no mapping)
            layer, _, kind = name.rpartition(".")
            layer = layer.rpartition(".")[2]
            stored = content.get_slice(name)
            if layer in _INPUTS:
                yield name, _of_inputs(stored, kind, ranks)
            else:
                yield name, _of_outputs(stored, layer, config, ranks)


def _of_inputs(stored: torch.Tensor, kind: str, ranks: Ranks) -> torch.Tensor:
    """A layer whose outputs are summed: the first rank alone adds the bias."""
    if kind == "bias":
        whole: torch.Tensor = stored[:]
        return whole if ranks.rank == 0 else torch.zeros_like(whole)
    inputs = stored.get_shape()[1] // ranks.size
    return stored[:, ranks.rank * inputs : (ranks.rank + 1) * inputs]


def _of_outputs(stored: torch.Tensor, layer: str, config: PreTrainedConfig, ranks: Ranks) -> torch.Tensor:
    """A layer of which each rank computes some outputs, or one that every rank has whole."""
    rank, size = ranks.rank, ranks.size
    if layer in _KEYS_AND_VALUES and config.num_key_value_heads < size:
        # Ranks whose queries share a head each have it.
        rank, size = rank * config.num_key_value_heads // size, config.num_key_value_heads
    elif layer not in (*_QUERIES, *_KEYS_AND_VALUES, *_INNER_OUTPUTS, *_VOCABULARY):
        return stored[:]
    count = stored.get_shape()[0]
    outputs = -(-count // size)
    part: torch.Tensor = stored[rank * outputs : min((rank + 1) * outputs, count)]
    # Of a vocabulary that ranks cannot divide, the last has fewer tokens than others.
    missing = outputs - part.shape[0]
    return torch.cat((part, part.new_zeros(missing, *part.shape[1:]))) if missing else part
