"""Weights of a GGUF file under the names that transformers has for them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from transformers import PreTrainedConfig

from engine.errors import UnsupportedModelError
from engine.quantization.gguf_file import GgufFile
from engine.quantization.weights import QuantizedWeight

MODEL_TYPES = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_GEMMA3_LAYER = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# What scales rotary positions: the configuration says the same.
_ROPE_FACTORS = "rope_freqs.weight"
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def gguf_weights(file: GgufFile, config: PreTrainedConfig) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    """Each of the file's tensors, with the name of the parameter that it is of a model with this configuration.

    Raises UnsupportedModelError for models of other types and for tensors that have no such name.
    """
    if config.model_type not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"{file.path.name} holds a model of type {config.model_type}, must be one of {', '.join(MODEL_TYPES)}"
        )
    for name in file.tensors:
        if name == _ROPE_FACTORS:
            continue
        weight = file.read(name)
        if config.model_type == "gemma3_text" and name.endswith("norm.weight") and isinstance(weight, torch.Tensor):
            weight = weight - 1  # files have what the model multiplies by
        heads = _interleaved_heads(name, config)
        if heads:
            weight = _rows_by_halves(file, name, weight, heads)
        yield _parameter_name(file, name, config), weight


def _parameter_name(file: GgufFile, name: str, config: PreTrainedConfig) -> str:
    of_layer = _OF_LAYER | (_OF_GEMMA3_LAYER if config.model_type == "gemma3_text" else {})
    found = _NAME.fullmatch(name)
    if found:
        layer, part, kind = found.groups()
        if layer is None and part in _OUTER:
            return f"{_OUTER[part]}.{kind}"
        if layer is not None and part in of_layer:
            return f"model.layers.{int(layer)}.{of_layer[part]}.{kind}"
    raise UnsupportedModelError(f"{file.path.name} holds {name!r}, which is no tensor of a supported model")


def _interleaved_heads(name: str, config: PreTrainedConfig) -> int:
    """Heads of queries or keys whose rotated pairs of rows are neighbours; 0 for other tensors and models."""
    if config.model_type not in ("llama", "mistral"):
        return 0
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
