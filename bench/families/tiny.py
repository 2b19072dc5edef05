"""A tiny model of any family of transformers, with random weights."""

from __future__ import annotations

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCABULARY = 96
_MAX_PARAMETERS = 20_000_000
# A size is set where the family's configuration has it under this name.
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "word_embed_proj_dim": 64,
    "rotary_dim": 16,
    "max_position_embeddings": 64,
    "max_seq_len": 64,
    # Mixtures of experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "n_shared_experts": 1,
    "moe_layer_start_index": 0,
    "moe_layer_end_index": 1,
    "first_k_dense_replace": 1,
    # Of attention over compressed keys and values.
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    # Embeddings of other widths than the layers.
    "embedding_size": 64,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def tiny_config(family: str) -> PreTrainedConfig:
    """As the family has it by itself, only small, and without windows where these are an option.

    Raises what transformers raises where that is no model.
    """
    kind = CONFIG_MAPPING[family]
    usual = kind()
    sizes = {name: size for name, size in _SIZES.items() if _has_number(usual, name)}
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    try:
        return kind(**sizes, **_NO_TOKENS, **_without_windows(usual), tie_word_embeddings=False)
    except StrictDataclassError:
        return kind(**sizes, tie_word_embeddings=False)  # this one must have tokens and windows


def _has_number(config: PreTrainedConfig, name: str) -> bool:
    """One that can be set."""
    own = getattr(type(config), name, None)
    return not isinstance(own, property) and isinstance(getattr(config, name, None), int)


def _without_windows(config: PreTrainedConfig) -> dict[str, None]:
    """Nothing where some layers are of a type that needs a window."""
    needed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    return {"sliding_window": None} if hasattr(config, "sliding_window") and not needed else {}


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Weights spread widely enough that the next token depends on the context and no two logits are nearly equal."""
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    if parameters > _MAX_PARAMETERS:
        raise ValueError(f"the small model has {parameters} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model.eval()
