"""EAGLE-3 heads for tiny targets, and what they must propose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.reference_heads import ReferenceHead

ARCHITECTURE = "LlamaForCausalLMEagle3"


def head_config(target: PreTrainedModel, **changes: Any) -> dict[str, Any]:
    """With other sizes of attention and MLP than the target's."""
    config = target.config
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": 112,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 512,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size // 2,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
    } | changes


def head_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """At random; every second token of the target can be proposed, but for the last ones."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, rows = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (rows, hidden),
    }
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.25 for name, shape in shapes.items()}
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = 1 + torch.randn(hidden, generator=generator) * 0.1
    proposed = torch.arange(rows) * config["vocab_size"] // rows
    tensors["d2t"] = proposed - torch.arange(rows)
    tensors["t2d"] = torch.isin(torch.arange(config["vocab_size"]), proposed)
    return tensors


def save_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


class ReferenceEagle(ReferenceHead):
    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        super().__init__(load_file(folder / "model.safetensors"), config, target)

    def _features(self, states: Sequence[Tensor]) -> Tensor:
        chosen = torch.cat([states[layer][0] for layer in self.config["eagle_aux_hidden_state_layer_ids"]], -1)
        return self._product("fc", chosen)

    def _logits(self, output: Tensor) -> dict[int, float]:
        logits = self._product("lm_head", self._norm("norm", output)).tolist()
        return {column + int(self.tensors["d2t"][column]): value for column, value in enumerate(logits)}

    def _layer(self, tokens: Tensor, features: Tensor, first: int) -> Tensor:
        own = self.tensors.get("embed_tokens.weight")
        embedding = self.target.get_input_embeddings().weight if own is None else own
        normed = self._norm("midlayer.hidden_norm", features)
        both = torch.cat((self._norm("midlayer.input_layernorm", embedding[tokens]), normed), -1)
        residual = normed if self.config.get("norm_before_residual") else features
        hidden = residual + self._attention("midlayer.self_attn", both, first)
        return hidden + self._mlp("midlayer.mlp", self._norm("midlayer.post_attention_layernorm", hidden))
