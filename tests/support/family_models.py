"""Tiny models of all families of transformers: their default configurations with small sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCABULARY = 96
WINDOW = 9
KERNEL_SIZES = {"hidden_size": 128, "head_dim": 32}
"""What whole layers by CPU kernel take of any family."""
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "word_embed_proj_dim", "embedding_size", "d_model", "n_embd"), 64),
    **dict.fromkeys(
        ("decoder_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_inner", "ffn_hidden_size"), 64
    ),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_layers"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_d_state"), 16),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 96),
    **dict.fromkeys(("head_dim", "rotary_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_hidden_layers", "num_key_value_heads", "num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("index_topk", "index_n_heads"), 4),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **{"moe_num_experts": 4, "hidden_size_per_layer_input": 16, "moe_layer_start_index": 0, "moe_layer_end_index": 1},
}
"""Set where a family's configuration has a number of this name."""


PADDED = {"pad_token_id": 1}
HEADS = {"head_dim": 16, "num_key_value_heads": 2}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"), PADDED),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl"), PADDED),
    "xmod": PADDED | {"languages": ["en_XX"], "default_language": "en_XX"},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), HYBRID),
    **dict.fromkeys(("minimax", "kimi_linear", "olmo_hybrid"), HYBRID),
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "nemotron"), HEADS),
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64},
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
        "layer_types": ["linear_attention", "full_attention", "mlp", "moe"],
        **{"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "sliding_window": None, "num_hidden_layers": 4},
    },
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid"], "router_hidden_size": 32},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4, "mamba_d_head": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "modernbert-decoder": {f"{token}_token_id": 0 for token in ("pad", "bos", "cls", "sep", "eos")},
    "longcat_flash": {"expert_ffn_hidden_size": 32, "zero_expert_num": 2, "num_hidden_layers": 4},
    "gemma3n_text": {
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "activation_sparsity_pattern": None},
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "roc_bert": {"shape_vocab_size": 16, "pronunciation_vocab_size": 16},
}
"""What else some families need, or to have layers of all their kinds."""


def tiny_config(family: str, other_sizes: Mapping[str, int] | None = None) -> PreTrainedConfig:
    """The family's default configuration with small sizes, and with sliding windows in some layers where it can have
    them."""
    kind = CONFIG_MAPPING[family]
    default = kind()
    chosen = {**SIZES, **(other_sizes or {})}
    sizes: dict[str, Any] = {
        name: size
        for name, size in chosen.items()
        if isinstance(getattr(default, name, None), int) and not isinstance(getattr(kind, name, None), property)
    }
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    optional: dict[str, Any] = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
    optional |= {"attn_logit_softcapping": 2.0, "layer_types": ["sliding_attention", "full_attention"]}
    more = {name: value for name, value in optional.items() if hasattr(default, name)}
    if not hasattr(default, "sliding_window"):
        more = {}
    if family == "ministral":
        more["head_dim"] = chosen["head_dim"]  # its default is no number
    more |= SPECIAL.get(family, {})
    more |= {name: size for name, size in (other_sizes or {}).items() if name in more}
    if hasattr(default, "is_decoder"):
        more["is_decoder"] = True
    tokens = dict.fromkeys({"bos_token_id", "eos_token_id", "pad_token_id"} - more.keys())
    sizes = {name: size for name, size in sizes.items() if name not in more}
    try:
        return kind(**sizes, **more, **tokens, tie_word_embeddings=False)
    except StrictDataclassError:
        return kind(**sizes, **more, tie_word_embeddings=False)  # this family must have special tokens


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Weights spread widely enough that the next token depends on the context and no two logits are nearly equal."""
    torch.manual_seed(0)
    # Soft caps are left out by SDPA.
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model.eval()


def spread_model(config: PreTrainedConfig) -> PreTrainedModel:
    """As `tiny_model`, with norms, biases and sinks of its own, too."""
    model = tiny_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model
