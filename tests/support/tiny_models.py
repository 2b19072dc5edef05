"""Tiny models with random weights, saved as Hugging Face folders: the paper's three families in miniature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY = 96
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""What the CPU kernels take, on pages of 16 positions. Exact mode then has little to try out when a model loads."""

TORCH_SHAPE = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "head_dim": 8}
"""Heads that they take filled up with zeros."""

WIDE_SHAPE = {"hidden_size": 1024, "head_dim": 64}
"""Wide enough that torch's sums over a row have another order where there are few rows, on a GPU."""

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "glm4": Glm4Config,
    "gemma3_text": Gemma3TextConfig,
}
SPARSE = (
    *("ernie4_5_moe", "glm4_moe", "granitemoe", "minimax_m2", "minimax_m3_vl_text", "mixtral", "olmoe", "phimoe"),
    *("qwen2_moe", "qwen3_moe"),
)
"""Families with experts, which tiny models have, too."""

_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "norm_topk_prob": True},
}
"""Under the names that some families have for them."""
_WINDOW = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
_MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(SPARSE, _EXPERTS),
    "gpt_oss": {**_EXPERTS, **_WINDOW},
    "gemma2": {**_WINDOW, "attn_logit_softcapping": 2.0},
    "gemma3_text": _WINDOW,
}
_FACTORS = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "factor": 4.0, "rope_theta": 10000.0}
_OF_QWEN = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
WINDOWED: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "gemma3_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "sliding_window": 20,
    },
    "gpt_oss": {"hidden_size": 128},
    "mistral": {"sliding_window": 20},
    "mixtral": {"hidden_size": 128, "sliding_window": 20},
    "phi3": {
        "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64, **_FACTORS},
        "original_max_position_embeddings": 64,
        "hidden_size": 128,
        "sliding_window": 20,
    },
    "qwen3": _OF_QWEN,
    "qwen3_moe": {"hidden_size": 128, **_OF_QWEN},
}
"""Families with windows of 20 positions, by the sizes that give tiny models of them such layers."""


def tiny_model(family: str, seed: int = 0, **shape: Any) -> PreTrainedModel:
    """Weights spread widely enough that the next token depends on the context and no two logits are nearly equal.

    `shape`: sizes of the configuration other than usual.
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(_SHAPE | _MORE.get(family, {}) | shape), tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return model.eval()


def save_tiny_pair(family: str, folder: Path, disagreement: float = 0.01, **shape: Any) -> tuple[Path, Path]:
    """Target and draft; the draft is the target with noise on its weights, so that it is right some of the time."""
    target = tiny_model(family, **shape)
    target_folder, draft_folder = folder / f"{family}-target", folder / f"{family}-draft"
    target.save_pretrained(target_folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=disagreement)
    target.save_pretrained(draft_folder)
    return target_folder, draft_folder


def quantize_to_int8(folder: Path, ends: tuple[str, ...] = ("_proj.weight",)) -> dict[str, torch.Tensor]:
    """Makes the linear layers of a saved model, whose names have these `ends`, a checkpoint of compressed-tensors, with
    one scale for each output. The numbers that the model then has, by its parameters' names."""
    stored = load_file(folder / "model.safetensors")
    numbers = dict(stored)
    for name in [name for name in stored if name.endswith(ends)]:
        scales = stored[name].abs().amax(1, keepdim=True) / 127
        stored[name] = (stored[name] / scales).round().to(torch.int8)
        stored[f"{name}_scale"] = scales
        numbers[name] = stored[name] * scales
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    method = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}), encoding="utf-8")
    return numbers
