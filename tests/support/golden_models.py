"""Tiny models whose weights are the same on every machine, which torch's random numbers are not."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spool.engine.sampling.noise import noise_bits, top_bits
from tests.support.gguf_models import TOKENS, write_model

FAMILIES = ("llama", "qwen2", "qwen3")
"""Of which everything is computed by the CPU kernels."""

STORED = ("Q4_K", "Q6_K", "Q8_0")
WEIGHTS = ("none", "int4", "int8", *STORED)
"""Quantisations: of bfloat16 numbers when they are loaded, and as a file has them."""

VOCABULARY = len(TOKENS)
_SHAPE = {
    "vocab_size": 288,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


_ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPES = {
    "llama": _ROPE | _LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 1024},
    "qwen2": _ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "qwen3": _ROPE,
}
"""Files have the plain one."""


def golden_tokens(count: int) -> list[int]:
    return (top_bits(noise_bits(torch.tensor([7]), torch.arange(count))) % VOCABULARY).tolist()


def golden_folder(family: str, weights: str, folder: Path) -> Path:
    """A model's folder or file, whose weights are bfloat16 numbers or are quantised as a file of the type is."""
    model = golden_model(family, _ROPE if weights in STORED else _ROPES[family])
    if weights in STORED:
        kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        write_model(folder / "model.gguf", family, quantized=True, types=dict.fromkeys(kinds, weights), model=model)
        return folder / "model.gguf"
    model.bfloat16().save_pretrained(folder)
    return folder


def golden_model(family: str, rope: dict[str, Any]) -> PreTrainedModel:
    """In float32. Biases and norms are like other weights."""
    config = AutoConfig.for_model(family, rope_parameters=rope, **_SHAPE)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            bits = top_bits(noise_bits(torch.tensor([zlib.crc32(name.encode())]), torch.arange(parameter.numel())))
            # Of 24 bits, so that nothing is rounded.
            parameter.copy_(((bits >> 8) - (1 << 23)).view(parameter.shape) * 2.0**-25)
    return model.eval()
