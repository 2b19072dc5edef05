"""GGUF files of tiny models, written by the gguf package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("h", "i"), ("1", "2"), ("12", "3"), ("Ġ", "hi")]
BYTES = sorted(ByteLevel.alphabet())
TOKENS = [*BYTES, *("".join(pair) for pair in MERGES), *SPECIAL, "<tool>", "[PAD264]"]
TYPES = [1] * (len(BYTES) + len(MERGES)) + [3] * len(SPECIAL) + [4, 5]
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 288,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
GEMMA3: dict[str, Any] = {
    "sliding_window": 9,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "rope_parameters": {"sliding_attention": ROPE, "full_attention": SHAPE["rope_parameters"]},
}
NEAR: dict[str, Any] = {"rope_parameters": ROPE}
"""Of files that do not say what the base of rotary positions is."""
WINDOW: dict[str, Any] = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
PARTS = {"rope_parameters": SHAPE["rope_parameters"] | {"partial_rotary_factor": 0.5}}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 2.5, 4.0, 4.5]}
SHAPES: dict[str, dict[str, Any]] = {
    "cohere": {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "num_hidden_layers": 4, "sliding_window": 9},
    "gemma": NEAR,
    "gemma2": NEAR | WINDOW | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 4.0},
    "gemma3_text": GEMMA3,
    "glm4": PARTS | {"attention_bias": True},
    "granite": GRANITE,
    "phi3": PARTS | {"sliding_window": 9, "original_max_position_embeddings": 128},
    "seed_oss": {"attention_bias": True, "mlp_bias": False},
    "smollm3": {"num_hidden_layers": 4},
    "starcoder2": {"norm_epsilon": 1e-5, "use_bias": True, "sliding_window": None},
}
"""What configurations of these kinds have beside or in place of `SHAPE`."""
ALWAYS_TIED = ("cohere", "cohere2", "gemma", "gemma2")
"""Kinds whose files have no head of its own."""
INTERLEAVED = ("arcee", "granite", "llama", "smollm3")
Change = Callable[[gguf.GGUFWriter], None]


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's conversion has the rows of queries and keys."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def random_model(kind: str, tied: bool = False, **fields: Any) -> PreTrainedModel:
    """In float32; `fields` of its configuration other than usual."""
    torch.manual_seed(3)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(kind, tie_word_embeddings=tied, **tokens | shape_of(kind) | fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
        if parameter.dim() == 1:
            # So few digits that adding 1 rounds none off.
            parameter.detach().copy_((parameter * 64).round() / 64)
    return model.eval()


def write_model(
    path: Path,
    kind: str,
    tied: bool = False,
    quantized: bool = False,
    pre: str = "smollm",
    changes: Iterable[Change] = (),
    types: Mapping[str, str] = MappingProxyType({}),
    model: PreTrainedModel | None = None,
    without: Iterable[str] = (),
    part_tensors: int = 0,
) -> dict[str, torch.Tensor]:
    """The parameters of the model that the file then holds, by transformers' names: those of `model` or of a random
    one, but those with a part of a name in `without`. `types` of layers other than Q8_0, where it is `quantized`.
    `part_tensors`: of each part of a file in parts, whose names begin with that of `path`."""
    model = random_model(kind, tied) if model is None else model
    architecture, config = architecture_of(kind), model.config
    [number] = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    add_own_keys(writer, kind, config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if kind not in ("gemma", "gemma2"):
        writer.add_rope_freq_base(SHAPE["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_eos_token_id(TOKENS.index("<|im_end|>"))
    writer.add_bos_token_id(TOKENS.index("<|im_start|>"))
    writer.add_chat_template("{{ messages }}")
    for change in changes:
        change(writer)
    parameters = {}
    for name, parameter in model.named_parameters():
        if any(part in name for part in without):
            continue
        data = parameter.detach().numpy()
        stem, suffix = name.rsplit(".", 1)
        stored = data
        heads = heads_of(name, config) if kind in INTERLEAVED else 0
        if heads:
            stored = interleaved(data, heads)
        if kind in ("gemma", "gemma2", "gemma3_text") and name.endswith("norm.weight"):
            stored = data + 1
        raw = None
        if quantized and data.ndim == 2 and not stem.endswith("norm"):
            raw = gguf.GGMLQuantizationType[types.get(stem.rpartition(".")[2], "Q8_0")]
            blocks = quantized_blocks(data, raw)
            data = gguf.quants.dequantize(blocks, raw)
            stored = interleaved(blocks, heads) if heads else blocks
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", stored, raw_dtype=raw)
        parameters[name] = torch.from_numpy(data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return parameters


def architecture_of(kind: str) -> str:
    return {"cohere": "command-r", "gemma3_text": "gemma3"}.get(kind, kind)


def add_own_keys(writer: gguf.GGUFWriter, kind: str, config: PreTrainedConfig) -> None:
    """As llama.cpp's conversion of this kind says what not all kinds have."""
    if kind in ("cohere", "cohere2", "starcoder2"):
        writer.add_layer_norm_eps(config.norm_epsilon if kind == "starcoder2" else config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if kind in ("cohere2", "gemma2", "gemma3_text", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if kind in ("cohere", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if kind in ("gemma", "gemma2", "seed_oss", "ernie4_5"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind in ("glm4", "phi3"):
        writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    elif kind in (*INTERLEAVED, "cohere2"):
        writer.add_rope_dimension_count(config.head_dim)
    if kind == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for name, tensor in (("long_factor", "rope_factors_long"), ("short_factor", "rope_factors_short")):
            if name in config.rope_parameters:
                writer.add_tensor(f"{tensor}.weight", np.array(config.rope_parameters[name], np.float32))


def shape_of(kind: str) -> dict[str, Any]:
    own = SHAPES.get(kind, {})
    has_other_norms = {"layer_norm_eps", "norm_epsilon"} & own.keys()
    return {name: value for name, value in SHAPE.items() if name != "rms_norm_eps" or not has_other_norms} | own


def heads_of(name: str, config: PreTrainedConfig) -> int:
    if "q_proj" in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if "k_proj" in name else 0


def quantized_blocks(numbers: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Bytes of numbers `[out, in]` as the package quantises them; of types that it only reads, bytes of other numbers,
    made of these ones' bits, with scales of at most 2^-12."""
    try:
        return gguf.quants.quantize(numbers, kind)
    except NotImplementedError:
        size, of_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = numbers.reshape(len(numbers), -1, size)
        # The lowest bits but one, as the very lowest may all be 0.
        raw = (blocks.view(np.uint32)[..., :of_bytes] >> 5).astype(np.uint8)
        scales = (np.abs(blocks[..., :2]) % 2**-12).astype(np.float16).view(np.uint8)
        if kind is gguf.GGMLQuantizationType.Q6_K:
            raw[..., -2:] = scales[..., :2]
        else:
            raw[..., :4] = scales
        return raw.reshape(len(numbers), -1)


def stated(key: str, value: object) -> Change:
    """The file has this value, a list, text, flag, whole number or number, in place of any other under this key."""

    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        adding = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        adding.get(type(value), writer.add_array)(key, value)

    return change


def without(key: str) -> Change:
    """The file does not have this key."""
    return lambda writer: [keys.pop(key, None) for keys in writer.kv_data]


def added(name: str, *shape: int) -> Change:
    """The file has one more tensor, of ones."""
    return lambda writer: writer.add_tensor(name, np.ones(shape, np.float32))
