"""Families of transformers whose decoder layers are described (engine/layers/describing.py), each by how its modules
differ from Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def _window_of_configuration(attention: Any) -> int | None:
    window: int | None = getattr(attention.config, "sliding_window", None)
    return window


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names of modules within a decoder layer, and what is done with them. The defaults are Llama's, Qwen2's and
    Qwen3's.

    `qkv` names three layers, or one, whose outputs are all queries, keys and values or, if `qkv_by_head`, those of each
    head in turn. `up` names the gate and its fellow, or one layer for both, or for the one if there is no gate
    (`gated`). The norms of heads are there or not, as each model has it. `interleaved` rotations turn neighbours;
    `rotated` says whether a layer rotates at all.
    """

    attention: str = "self_attn"
    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    qkv_by_head: bool = False
    out: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    head_norms_after_rotation: bool = False
    window: Callable[[Any], int | None] = lambda attention: getattr(attention, "sliding_window", None)
    softcap: str | None = None
    mlp: str = "mlp"
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    gated: bool = True
    down: str = "down_proj"
    activation: str = "act_fn"
    parallel: Callable[[Any], bool] = lambda layer: False
    norm_offset: float = 0.0
    """Added to the weights of all norms, in float32."""
    interleaved: bool = False
    backwards: bool = False
    """Whether rotations turn the other way."""
    rotated: Callable[[Any], bool] = lambda attention: True
    exact_angles: bool = False
    """Whether cosines and sines stay in float32."""
    embed: str = "embed_tokens"
    embedding_norm: str | None = None
    norm: str = "norm"
    head_multiplier: Callable[[Any], float] = lambda config: 1.0
    head_cap: str | None = None
    fits: Callable[[Any], bool] = lambda config: True
    """Whether a configuration asks for nothing beyond this entry."""


_POST_NORMS: dict[str, Any] = {"attention_post_norm": "post_attention_layernorm"}
_POST_NORMS |= {"mlp_post_norm": "post_feedforward_layernorm"}
_NORMS_BEHIND: dict[str, Any] = _POST_NORMS | {"attention_norm": None, "mlp_norm": None}
_NORMS_AROUND: dict[str, Any] = _POST_NORMS | {"mlp_norm": "pre_feedforward_layernorm"}
_GATE_UP: dict[str, Any] = {"up": ("gate_up_proj",), "activation": "activation_fn"}
_DENSE: dict[str, Any] = {"up": ("fc1",), "gated": False, "down": "fc2", "activation": "activation_fn"}
_NEOX: dict[str, Any] = {"qkv": ("query_key_value",), "qkv_by_head": True, "out": "dense"}
_NEOX |= {"up": ("dense_h_to_4h",), "gated": False, "down": "dense_4h_to_h", "activation": "act"}
_PARALLEL: dict[str, Any] = {"mlp_norm": None, "parallel": lambda layer: True}
_COHERE: dict[str, Any] = {"interleaved": True, "head_multiplier": lambda config: config.logit_scale, **_PARALLEL}
_GEMMA: dict[str, Any] = {"norm_offset": 1.0, "head_cap": "final_logit_softcapping"}
_GRANITE: dict[str, Any] = {"head_multiplier": lambda config: 1 / config.logits_scaling}
_UNCLIPPED: dict[str, Any] = {"fits": lambda config: config.clip_qkv is None}

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("cwm", "llama", "ministral", "qwen2", "qwen3", "seed_oss"), Family()),
    **dict.fromkeys(("dots1", "glm4_moe", "gpt_oss", "minimax_m2", "qwen2_moe", "qwen3_moe", "solar_open"), Family()),
    **dict.fromkeys(("arcee", "jais2"), Family(up=("up_proj",), gated=False)),
    **dict.fromkeys(("mistral", "mixtral", "phimoe"), Family(window=_window_of_configuration)),
    "phi3": Family(qkv=("qkv_proj",), window=_window_of_configuration, **_GATE_UP),
    "smollm3": Family(rotated=lambda attention: bool(attention.use_rope)),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), Family(interleaved=True, exact_angles=True)),
    "helium": Family(interleaved=True),
    "glm": Family(interleaved=True, **_GATE_UP),
    "glm4": Family(
        interleaved=True,
        attention_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
        **_GATE_UP,
    ),
    "gemma": Family(norm_offset=1.0),
    "gemma2": Family(softcap="attn_logit_softcapping", **_GEMMA, **_NORMS_AROUND),
    "gemma3_text": Family(**_GEMMA, **_NORMS_AROUND),
    "vaultgemma": Family(softcap="attn_logit_softcapping", mlp_norm="pre_feedforward_layernorm", **_GEMMA),
    "olmo": Family(exact_angles=True, **_UNCLIPPED),
    "olmoe": Family(window=_window_of_configuration, **_UNCLIPPED),
    **dict.fromkeys(("flex_olmo", "olmo2", "olmo3"), Family(exact_angles=True, **_NORMS_BEHIND)),
    "exaone4": Family(
        window=lambda attention: attention.sliding_window if attention.is_sliding else None,
        rotated=lambda attention: attention.sliding_window is None or attention.is_sliding,
        **_NORMS_BEHIND,
    ),
    **dict.fromkeys(("granite", "granite_swa"), Family(**_GRANITE)),
    "granitemoe": Family(mlp="block_sparse_moe", **_GRANITE),
    "hyperclovax": Family(
        attention_post_norm="post_norm1",
        mlp_post_norm="post_norm2",
        head_multiplier=lambda config: config.logits_scaling,
    ),
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe"),
        Family(head_norms=("query_layernorm", "key_layernorm"), head_norms_after_rotation=True),
    ),
    "cohere": Family(**_COHERE),
    "cohere2": Family(rotated=lambda attention: attention.sliding_window is not None, **_COHERE),
    "phi": Family(
        out="dense", head_norms=("q_layernorm", "k_layernorm"), norm="final_layernorm", **_PARALLEL, **_DENSE
    ),
    "starcoder2": Family(up=("c_fc",), gated=False, down="c_proj", activation="act", window=_window_of_configuration),
    "nanochat": Family(
        backwards=True,
        head_norms_after_rotation=True,
        embedding_norm="norm",
        head_cap="final_logit_softcapping",
        **_DENSE,
    ),
    "gpt_neox": Family(
        attention="attention",
        parallel=lambda layer: bool(layer.use_parallel_residual),
        embed="embed_in",
        norm="final_layer_norm",
        **_NEOX,
    ),
    "persimmon": Family(head_norms=("q_layernorm", "k_layernorm"), norm="final_layernorm", **_NEOX),
}
"""By model type."""
