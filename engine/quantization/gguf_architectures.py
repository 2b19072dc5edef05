"""Architectures of GGUF files: what converters of llama.cpp write of each, in terms of transformers' models.

Knows no torch: launchers make configurations of files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spool.engine.quantization.gguf_file import GgufFile
from spool.engine.quantization.gguf_values import count, layer_types, positive, shortest, wrong

ROPE_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
"""Of rotary positions of type longrope: what frequencies are divided by, as transformers and as files name it."""

_Fields = Callable[[GgufFile, dict[str, Any]], dict[str, Any]]
"""What config.json says beyond the common fields, which are given."""

_NAMES = {
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """`model_type` and `class_name` are transformers'. `names`: modules of a layer by the parts of tensors' names,
    where they are not Llama's."""

    model_type: str
    class_name: str
    names: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    """Whether rows of queries and keys that transformers turns against each other, one of a head's first half and one
    of its second, are neighbours in files: where llama.cpp turns neighbours and transformers does not."""
    norm_offset: float = 0.0
    """What norms of files have more than transformers' parameters, to which it is added when they compute."""
    epsilon: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    """Of norms, as transformers and as files name it."""
    turns_part: bool = False
    """Whether positions may turn a part of a head only, its first numbers."""
    biases: tuple[str, ...] = ()
    """Fields of transformers' configuration: whether linear layers have biases (`BIASES` of gguf_folder.py)."""
    biased_unless_told: bool = False
    """Whether transformers takes them to be there where config.json does not say."""
    half: str = "float16"
    """The dtype of files whose numbers are float16."""
    fields: _Fields = lambda file, config: {}
    keys: tuple[str, ...] = ()
    """Keys that `fields` reads or checks, without the architecture's name."""

    @property
    def of_layer(self) -> dict[str, str]:
        return _NAMES | dict(self.names)


_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WINDOW = ("attention.sliding_window", "attention.sliding_window_pattern")
_LAYER_NORM = ("layer_norm_eps", "attention.layer_norm_epsilon")
_GEMMA3_27B_LAYERS, _GEMMA2_27B_LAYERS = 62, 46
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_STARCODER2_WINDOW, _STARCODER2_LAYERS = 4096, (30, 32, 40)


def _query_scale(config: Mapping[str, Any], largest: int) -> int:
    """What scores are divided by the root of. Files do not say it, and it differs in the largest model, of so many
    layers."""
    is_largest = config["num_hidden_layers"] == largest
    own: int = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    return own


def _gemma2(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query_scale(config, _GEMMA2_27B_LAYERS),
        "attn_logit_softcapping": positive(file, "gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": positive(file, "gemma2.final_logit_softcapping", 30.0),
        "sliding_window": count(file, "gemma2.attention.sliding_window", 4096),
        "layer_types": layer_types(file, 2),
    }


def _gemma3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": positive(file, "gemma3.rope.freq_base_swa", 10_000.0)}
    return {
        "sliding_window": count(file, "gemma3.attention.sliding_window"),
        "query_pre_attn_scalar": _query_scale(config, _GEMMA3_27B_LAYERS),
        "rope_parameters": {"sliding_attention": local, "full_attention": config["rope_parameters"]},
    }


def _granite(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """All of them: what transformers takes for one that is missing is not what llama.cpp does."""
    if file.metadata.get("granite.rope.scaling.finetuned", True) is not True:
        raise wrong(file, "granite.rope.scaling.finetuned", False, "true: without, layers have no positions")
    return {name: positive(file, f"granite.{key}") for name, key in _GRANITE.items()}


def _cohere(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    has_norms = any("_q_norm." in name for name in file.tensors)
    return {"logit_scale": positive(file, "command-r.logit_scale"), "use_qk_norm": has_norms}


def _cohere2(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "logit_scale": positive(file, "cohere2.logit_scale"),
        "sliding_window": count(file, "cohere2.attention.sliding_window"),
        "layer_types": layer_types(file, 4),
    }


def _phi3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    longest, key = config["max_position_embeddings"], "phi3.rope.scaling.original_context_length"
    original, window = count(file, key, longest), file.metadata.get("phi3.attention.sliding_window")
    # 0 where there is none.
    found = {
        "sliding_window": count(file, "phi3.attention.sliding_window") if window else None,
        "original_max_position_embeddings": original,
    }
    factors = {name: tensor for name, tensor in ROPE_FACTORS.items() if tensor in file.tensors}
    if not factors:
        return found
    if len(factors) < len(ROPE_FACTORS):
        raise wrong(file, " and ".join(ROPE_FACTORS.values()), [*factors.values()], "both there, or none")
    scale = longest / original
    usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    scaling = positive(file, "phi3.rope.scaling.attn_factor", usual)
    rope: dict[str, Any] = config["rope_parameters"] | {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        **{name: [shortest(factor) for factor in file.floats(tensor)] for name, tensor in factors.items()},
    }
    if not math.isclose(scaling, usual, rel_tol=1e-6):
        rope["attention_factor"] = scaling
    return found | {"rope_parameters": rope}


def _starcoder2(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Files do not say that the published models (3B, 7B and 15B) have windows."""
    published = config["num_hidden_layers"] in _STARCODER2_LAYERS
    return {"sliding_window": _STARCODER2_WINDOW if published else None}


ARCHITECTURES: Mapping[str, Architecture] = {
    "arcee": Architecture(
        model_type="arcee", class_name="ArceeForCausalLM", interleaved=True, biases=("attention_bias", "mlp_bias")
    ),
    "cohere2": Architecture(
        model_type="cohere2",
        class_name="Cohere2ForCausalLM",
        epsilon=_LAYER_NORM,
        fields=_cohere2,
        keys=("logit_scale", *_WINDOW),
    ),
    "command-r": Architecture(
        model_type="cohere",
        class_name="CohereForCausalLM",
        epsilon=_LAYER_NORM,
        biases=("attention_bias",),
        fields=_cohere,
        keys=("logit_scale",),
    ),
    "ernie4_5": Architecture(model_type="ernie4_5", class_name="Ernie4_5ForCausalLM", biases=("use_bias",)),
    "gemma": Architecture(model_type="gemma", class_name="GemmaForCausalLM", norm_offset=1.0, half="bfloat16"),
    "gemma2": Architecture(
        model_type="gemma2",
        class_name="Gemma2ForCausalLM",
        names=_AROUND,
        norm_offset=1.0,
        half="bfloat16",
        fields=_gemma2,
        keys=("attn_logit_softcapping", "final_logit_softcapping", *_WINDOW),
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        class_name="Gemma3ForCausalLM",
        names=_AROUND,
        norm_offset=1.0,
        biases=("attention_bias",),
        half="bfloat16",
        fields=_gemma3,
        keys=("attention.sliding_window", "rope.freq_base_swa"),
    ),
    "glm4": Architecture(
        model_type="glm4",
        class_name="Glm4ForCausalLM",
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        turns_part=True,
        biases=("attention_bias",),
        biased_unless_told=True,
    ),
    "granite": Architecture(
        model_type="granite",
        class_name="GraniteForCausalLM",
        interleaved=True,
        biases=("attention_bias", "mlp_bias"),
        fields=_granite,
        keys=(*_GRANITE.values(),),
    ),
    "llama": Architecture(
        model_type="llama", class_name="LlamaForCausalLM", interleaved=True, biases=("attention_bias", "mlp_bias")
    ),
    "olmo2": Architecture(
        model_type="olmo2",
        class_name="Olmo2ForCausalLM",
        names={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        biases=("attention_bias",),
    ),
    "phi3": Architecture(
        model_type="phi3",
        class_name="Phi3ForCausalLM",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        turns_part=True,
        fields=_phi3,
        keys=("attention.sliding_window", "rope.scaling.attn_factor"),
    ),
    "qwen2": Architecture(model_type="qwen2", class_name="Qwen2ForCausalLM"),
    "qwen3": Architecture(model_type="qwen3", class_name="Qwen3ForCausalLM", biases=("attention_bias",)),
    "seed_oss": Architecture(
        model_type="seed_oss",
        class_name="SeedOssForCausalLM",
        names={"post_attention_norm": "post_attention_layernorm"},
        biases=("attention_bias", "attention_out_bias", "mlp_bias"),
        biased_unless_told=True,
    ),
    "smollm3": Architecture(
        model_type="smollm3", class_name="SmolLM3ForCausalLM", interleaved=True, biases=("attention_bias", "mlp_bias")
    ),
    "starcoder2": Architecture(
        model_type="starcoder2",
        class_name="Starcoder2ForCausalLM",
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon=("norm_epsilon", "attention.layer_norm_epsilon"),
        biases=("use_bias",),
        biased_unless_told=True,
        fields=_starcoder2,
    ),
}
"""By `general.architecture`."""
