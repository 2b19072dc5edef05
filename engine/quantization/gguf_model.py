"""Weights of a GGUF file under the names that transformers has for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spool.engine.errors import UnsupportedModelError
from spool.engine.leftovers import refuse_unused
from spool.engine.parallel.shards import whole_model
from spool.engine.quantization.gguf_architectures import ARCHITECTURES, ROPE_FACTORS, Architecture
from spool.engine.quantization.gguf_file import GgufFile
from spool.engine.quantization.gguf_keys import check_keys
from spool.engine.quantization.weights import QuantizedWeight

# Of mistral, folders that were made of such files by hand.
_ARCHITECTURE_OF = {one.model_type: one for one in ARCHITECTURES.values()} | {"mistral": ARCHITECTURES["llama"]}
MODEL_TYPES = (*sorted(_ARCHITECTURE_OF),)

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# What divides frequencies of rotary positions: the configuration says the same.
_ROPE_FACTORS = "rope_freqs.weight"
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


# Tensors of towers for images and sound, as converters name them.
_TOWERS = ("v.", "a.", "mm.")
# Biases that a model of such a configuration has in each of its layers, and that files have or not, one by one.
_OPTIONAL_BIASES = {
    "attention_bias": (".self_attn.",),
    "attention_out_bias": (".self_attn.o_proj.",),
    "mlp_bias": (".mlp.",),
    "use_bias": (".self_attn.", ".mlp."),
}


def gguf_weights(
    file: GgufFile, config: PreTrainedConfig, ignored: Sequence[str] = ()
) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    """Each of the file's tensors, with the name of the parameter that it is of a model with this configuration, and
    zeros for biases that only some of its layers have.

    Raises UnsupportedModelError for models of other types, and for tensors that a model of this configuration does not
    have and keys that are not known, but those of `ignored`.
    """
    if config.model_type not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"{file.path.name} holds a model of type {config.model_type}, must be one of {', '.join(MODEL_TYPES)}"
        )
    architecture = _ARCHITECTURE_OF[config.model_type]
    check_keys(file, ignored)
    shapes = {name: parameter.shape for name, parameter in whole_model(config).state_dict().items()}
    parameters = {name: _parameter_name(name, architecture) for name in file.tensors if not name.startswith(_TOWERS)}
    if _ROPE_FACTORS in file.tensors and _are_of_configuration(file.floats(_ROPE_FACTORS), config):
        del parameters[_ROPE_FACTORS]
    for field, tensor in ROPE_FACTORS.items():
        stated = (config.rope_parameters or {}).get(field)
        if tensor in file.tensors and stated is not None:
            found = file.floats(tensor)
            if len(found) == len(stated) and np.allclose(found, stated, rtol=1e-6):
                del parameters[tensor]
    refuse_unused(file.path.name, (name for name, parameter in parameters.items() if parameter not in shapes), ignored)
    for name, parameter in parameters.items():
        if parameter not in shapes:
            continue
        weight = file.read(name)
        if architecture.norm_offset and name.endswith("norm.weight") and isinstance(weight, torch.Tensor):
            weight = weight - architecture.norm_offset
        heads = _interleaved_heads(name, config) if architecture.interleaved else 0
        if heads:
            weight = _rows_by_halves(file, name, weight, heads)
        yield str(parameter), weight
    for field, parts in _OPTIONAL_BIASES.items():
        of_field = [name for name in shapes if name.endswith(".bias") and any(part in name for part in parts)]
        biases = of_field if getattr(config, field, 0) else []
        missing = set(biases) - set(parameters.values())
        if len(missing) < len(biases):
            yield from ((name, torch.zeros(shapes[name])) for name in sorted(missing))


def _are_of_configuration(factors: Sequence[float], config: PreTrainedConfig) -> bool:
    """Whether rotary positions of this configuration have frequencies that are divided by these factors."""
    rope, size = config.rope_parameters, config.head_dim
    plain = rope.get("rope_theta", 0.0) ** (-torch.arange(0, size, 2) / size)
    kind = rope.get("rope_type", "default")
    scaled = plain if kind == "default" else ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]
    expected = (plain / scaled).numpy()
    return len(factors) == len(expected) and np.allclose(factors, expected, rtol=1e-4)


def _parameter_name(name: str, architecture: Architecture) -> str | None:
    """None for a tensor that no supported model has."""
    of_layer, found = architecture.of_layer, _NAME.fullmatch(name)
    if found:
        layer, part, kind = found.groups()
        if layer is None and part in _OUTER:
            return f"{_OUTER[part]}.{kind}"
        if layer is not None and part in of_layer:
            return f"model.layers.{int(layer)}.{of_layer[part]}.{kind}"
    return None


def _interleaved_heads(name: str, config: PreTrainedConfig) -> int:
    """Heads of the rows of queries or keys; 0 for other tensors."""
    if ".attn_q." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".attn_k." in name else 0


def _rows_by_halves(
    file: GgufFile, name: str, weight: torch.Tensor | QuantizedWeight, heads: int
) -> torch.Tensor | QuantizedWeight:
    """transformers rotates a row of a head's first half with one of its second half."""
    out = weight.shape[0]
    if out % (2 * heads):
        raise UnsupportedModelError(
            f"{file.path.name}: {name} has {out} outputs, must have a multiple of {2 * heads} for {heads} heads"
        )
    order = torch.arange(out).view(heads, -1, 2).transpose(1, 2).flatten()
    return weight.rows(order) if isinstance(weight, QuantizedWeight) else weight[order]
