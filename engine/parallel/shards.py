"""Which part of a model each rank has: a model of the same family with fewer heads, narrower layers and some tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from spool.engine.errors import UnsupportedModelError
from spool.engine.layers.linear import summed_parts
from spool.engine.models.weights import model_of, safetensors_files, stored_tensors, wrong_shape
from spool.engine.parallel.heads import heads_of_a_rank
from spool.engine.parallel.layers import connect_layers
from spool.engine.parallel.ranks import Ranks
from spool.engine.quantization.weights import INPUT_MULTIPLE, QuantizedWeight, Weight

# Linear layers by their names.
_KEYS_AND_VALUES = ("k_proj", "v_proj")
_INNER = ("gate_proj", "up_proj", "down_proj")
_INPUTS = ("o_proj", "down_proj")
"""Their inputs are divided among ranks; of the others, their outputs."""
_VOCABULARY = ("embed_tokens", "lm_head")

_DIVIDED_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
_INNER_SIZES = ("intermediate_size", "moe_intermediate_size")


def check_divides(config: PreTrainedConfig, size: int) -> None:
    """Raises UnsupportedModelError for a model that `size` ranks cannot divide among them."""
    family, given = config.model_type, f"tensor_parallel_size is {size}"
    if family not in _DIVIDED_FAMILIES:
        raise UnsupportedModelError(
            f"{given}, must be 1 for models of type {family}: only {', '.join(_DIVIDED_FAMILIES)} models are divided "
            "among ranks"
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


def sums_as_one(config: PreTrainedConfig, size: int) -> bool:
    """Whether `size` ranks add up the inputs of every layer in the order of one rank (`summed_parts`): each has as many
    queries, and no group of inputs is cut."""
    part = part_of(config, size)
    inputs = part.num_attention_heads * part.head_dim, part.intermediate_size
    even = part.num_attention_heads * size == config.num_attention_heads
    return even and all(summed_parts(own, size) * size == 4 for own in inputs)


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


def read_part(
    folder: Path, config: PreTrainedConfig, dtype: str, ranks: Ranks, ignored: Sequence[str] = ()
) -> PreTrainedModel:
    """This rank's part of the model in `folder`, which is all that is read of its weights, connected to the others.
    Tensors of `ignored` may be left over.

    Raises UnsupportedModelError.
    """
    check_divides(config, ranks.size)
    files = safetensors_files(folder)
    if not files:
        raise UnsupportedModelError(f"{folder.name} holds no *.safetensors, which ranks read their parts from")
    stored, whole = stored_tensors(files), whole_model(config)
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights.update(parts_of(_tensors(file), whole, ranks.rank, ranks.size, file.name))
    model = model_of(folder, part_of(config, ranks.size), weights, dtype, stored, ignored)
    connect_layers(model, config.vocab_size, ranks)
    return model


def whole_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Without storage, to compare shapes with."""
    with torch.device("meta"):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)


def parts_of(
    weights: Iterable[tuple[str, Weight]], whole: PreTrainedModel, rank: int, size: int, file: str
) -> Iterator[tuple[str, Weight]]:
    """What a rank of `size` has of each weight; of those that all ranks have, the weight itself. A quantised weight
    whose inputs would be cut within a block of 32 is expanded.

    Raises UnsupportedModelError for a weight of `file` that has another shape than the whole model's.
    """
    config, shapes = whole.config, {name: parameter.shape for name, parameter in whole.named_parameters()}
    part = part_of(config, size)
    queries, keys = part.num_attention_heads * part.head_dim, part.num_key_value_heads * part.head_dim
    sizes = {"q_proj": queries, "o_proj": queries, **dict.fromkeys(_KEYS_AND_VALUES, keys)}
    sizes |= dict.fromkeys(_VOCABULARY, part.vocab_size)
    for name, weight in weights:
        if tuple(weight.shape) != tuple(shapes.get(name, weight.shape)):
            raise wrong_shape(file, name, weight.shape, shapes[name])
        layer, _, kind = name.rpartition(".")
        layer = layer.rpartition(".")[2]
        if layer in _INPUTS and kind == "bias":
            # Outputs are summed: the first rank alone adds the bias.
            yield name, weight if rank == 0 else torch.zeros_like(weight)
            continue
        dimension = 1 if layer in _INPUTS else 0
        own = weight.shape[dimension] // size if layer in _INNER else sizes.get(layer)
        # Ranks whose queries share a KV head each have it.
        shared = max(1, size // config.num_key_value_heads) if layer in _KEYS_AND_VALUES else 1
        yield name, weight if own is None else _cut(weight, dimension, rank // shared * own, own)


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Mapped, not read."""
    with safe_open(file, framework="pt") as content:
        for name in content.keys():  # noqa: SIM118  (no mapping)
            yield name, content.get_tensor(name)


def _cut(weight: Weight, dimension: int, first: int, size: int) -> Weight:
    """`size` outputs (dimension 0) or inputs (1) from the first on, of which those past the last are zeros."""
    if isinstance(weight, QuantizedWeight):
        if dimension == 1 and size % INPUT_MULTIPLE:
            return _cut(weight.expanded(), dimension, first, size)
        codes, scales, minimums = (
            _cut(
                part,
                dimension,
                first * part.shape[dimension] // weight.shape[dimension],
                size * part.shape[dimension] // weight.shape[dimension],
            ).clone(memory_format=torch.contiguous_format)
            for part in (weight.codes, weight.scales, weight.minimums)
        )
        return QuantizedWeight(weight.bits, weight.group, codes, scales, minimums)
    begin, end = (min(edge, weight.shape[dimension]) for edge in (first, first + size))
    part = weight.narrow(dimension, begin, end - begin)
    missing = list(part.shape)
    missing[dimension] = size - (end - begin)
    return torch.cat((part, part.new_zeros(missing)), dim=dimension) if missing[dimension] else part
