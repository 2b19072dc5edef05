"""Tiny targets whose folders hold an MTP layer, and what it must propose."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.reference_heads import ReferenceHead
from tests.support.tiny_models import tiny_model

FAMILIES = {"glm4_moe": "glm4_moe", "mimo": "qwen2"}
"""Those with published MTP layers, and the families that transformers makes them of."""
_NAMES = {
    "glm4_moe": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}


def save_target(
    folder: Path, family: str, layers: int, changes: Mapping[str, Tensor | None] | None = None, **shape: int
) -> PreTrainedModel:
    """At random, with its MTP layer, of which some tensors are changed or left out. Gives the target without that."""
    made_of = FAMILIES[family]
    target, other = (tiny_model(made_of, seed, num_hidden_layers=layers + seed, **shape) for seed in (0, 1))
    other.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    begin = f"model.layers.{layers}."
    layer = {name.removeprefix(begin): tensor for name, tensor in stored.items() if name.startswith(begin)}
    hidden, generator = target.config.hidden_size, torch.Generator().manual_seed(2)
    token_norm, hidden_norm, product, last_norm = _NAMES[family]
    layer[f"{product}.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.25
    for name in (token_norm, hidden_norm, last_norm, "input_layernorm", "post_attention_layernorm"):
        layer[f"{name}.weight"] = 1 + torch.randn(hidden, generator=generator) * 0.1
    for name in [name for name in layer if name.endswith("bias")]:
        layer[name] = torch.randn(layer[name].shape, generator=generator) * 0.1
    if family == "glm4_moe":
        layer |= {name: torch.zeros(4, hidden) for name in ("embed_tokens.weight", "shared_head.head.weight")}
    changed = {name: tensor for name, tensor in (layer | dict(changes or {})).items() if tensor is not None}
    save_with_layer(folder, family, target, changed)
    return target


def save_with_layer(folder: Path, family: str, target: PreTrainedModel, layer: dict[str, Tensor]) -> None:
    target.save_pretrained(folder)
    prefix = mtp_prefix(family, target.config.num_hidden_layers)
    stored = load_file(folder / "model.safetensors") | {prefix + name: tensor for name, tensor in layer.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    fields: dict[str, Any] = {"model_type": family, "num_nextn_predict_layers": 1}
    if family == "mimo":
        fields["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoConfig"}
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | fields), encoding="utf-8")


def mtp_prefix(family: str, layers: int) -> str:
    return f"model.layers.{layers}." if family == "glm4_moe" else "model.mtp_layers.0."


class ReferenceMtp(ReferenceHead):
    def __init__(self, folder: Path, target: PreTrainedModel, numbers: Mapping[str, Tensor] | None = None) -> None:
        """`numbers`: the folder's, where they are quantised there."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.family = config["model_type"]
        prefix = mtp_prefix(self.family, config["num_hidden_layers"])
        stored = load_file(folder / "model.safetensors") if numbers is None else numbers
        layer = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
        super().__init__(layer, config | config["rope_parameters"], target)

    def _features(self, states: Sequence[Tensor]) -> Tensor:
        # transformers gives the last one normed.
        return states[-1][0]

    def _logits(self, output: Tensor) -> dict[int, float]:
        return dict(enumerate((output @ self.target.lm_head.weight.T).tolist()))

    def _layer(self, tokens: Tensor, features: Tensor, first: int) -> Tensor:
        token_norm, hidden_norm, product, last_norm = _NAMES[self.family]
        pair = [
            self._norm(token_norm, self.target.get_input_embeddings().weight[tokens]),
            self._norm(hidden_norm, features),
        ]
        hidden = self._product(product, torch.cat(pair if self.family == "glm4_moe" else pair[::-1], -1))
        hidden = hidden + self._attention("self_attn", self._norm("input_layernorm", hidden), first)
        rows = self._norm("post_attention_layernorm", hidden)
        hidden = hidden + (self._mlp("mlp", rows) if "mlp.up_proj.weight" in self.tensors else self._experts(rows))
        return self._norm(last_norm, hidden)

    def _experts(self, rows: Tensor) -> Tensor:
        """Of one group."""
        shares = self._product("mlp.gate", rows).sigmoid()
        chosen = (shares + self.tensors["mlp.gate.e_score_correction_bias"]).topk(self.config["num_experts_per_tok"])
        output = self._mlp("mlp.shared_experts", rows)
        for place, experts in enumerate(chosen.indices.tolist()):
            of_all = shares[place, experts].sum()
            for expert in experts:
                own = self._mlp(f"mlp.experts.{expert}", rows[place])
                output[place] += own * shares[place, expert] / of_all * self.config["routed_scaling_factor"]
        return output
