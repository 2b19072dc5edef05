"""Targets whose next token nearly always is a permutation of the last one, with heads that know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.eagle_heads import head_config, head_tensors, save_head
from tests.support.mtp_heads import FAMILIES, save_with_layer

VOCABULARY = 96


def save_agreeing_pair(folder: Path, head: str = "eagle", hidden: int = 128) -> tuple[Path, str]:
    """The target's folder, and the name of its head: of an "eagle" one, of the "mtp" layer in that folder, or of a
    drafter in the format of speculators. A "peagle" one knows the first token, a "dflash" one proposes no other."""
    family = "mimo" if head == "mtp" else "llama"
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    after = torch.empty_like(order).scatter_(0, order, order.roll(-1))
    """The token that follows each one."""
    one_hot = torch.eye(VOCABULARY, hidden)
    next_of = torch.zeros(VOCABULARY, hidden).index_copy_(0, after, one_hot)
    target, target_folder = _target(FAMILIES.get(family, family), one_hot * 4, next_of), folder / "agreeing-target"
    if head == "mtp":
        save_with_layer(target_folder, family, target, _layer(target))
        return target_folder, "mtp"
    target.save_pretrained(target_folder)
    fields = head_config(target, draft_vocab_size=VOCABULARY, intermediate_size=VOCABULARY)
    tensors, scale = head_tensors(fields), hidden**0.5
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.fill_(1)
        elif "proj" in name:
            tensor.zero_()
    # Features are the embedding of a position's token; the MLP makes of it the embedding of the token after it.
    tensors["fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, 2 * hidden)), 1)
    gate_times_up = float(torch.nn.functional.silu(torch.tensor(scale))) * scale
    tensors["midlayer.mlp.gate_proj.weight"], tensors["midlayer.mlp.up_proj.weight"] = one_hot, one_hot.clone()
    tensors["midlayer.mlp.down_proj.weight"] = ((one_hot[after] - one_hot) * 4 / gate_times_up).T.contiguous()
    tensors["lm_head.weight"] = next_of
    if head != "eagle":
        fields, tensors = _drafter(head, fields, tensors)
    return target_folder, str(save_head(folder / "agreeing-head", fields, tensors))


def _drafter(kind: str, fields: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A DFlash drafter of the anchor alone needs no layer: the target's head knows what follows an embedding."""
    auxiliary, hidden = "eagle_aux_hidden_state_layer_ids", fields["hidden_size"]
    layer = {name: value for name, value in fields.items() if name not in ("architectures", "draft_vocab_size")}
    ids = layer.pop(auxiliary)
    config: dict[str, Any] = {"speculators_model_type": kind, "draft_vocab_size": VOCABULARY, "mask_token_id": 0}
    config |= {"transformer_layer_config": layer | {"model_type": "llama" if kind == "peagle" else "qwen3"}}
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    if kind == "peagle":
        return config | {auxiliary: ids}, named | {"mask_hidden": torch.zeros(1, 1, 3 * hidden)}
    size = fields["head_dim"]
    named |= {f"layers.0.self_attn.{name}_norm.weight": torch.ones(size) for name in "qk"}
    named["hidden_norm.weight"] = named.pop("layers.0.hidden_norm.weight")
    for name in [name for name in named if "_proj" in name]:
        narrow = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        named[name] = torch.zeros_like(named[name][:, :hidden] if narrow else named[name])
    return config | {"aux_hidden_state_layer_ids": ids, "block_size": 1, "sample_from_anchor": True}, named


def _target(family: str, embeddings: Tensor, next_of: Tensor) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=embeddings.shape[1],
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    target = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.normal_(0, 0.003 if "o_proj" in name or "down_proj" in name else 0.25)
        target.model.embed_tokens.weight.copy_(embeddings)
        target.lm_head.weight.copy_(next_of)
    return target


def _layer(target: PreTrainedModel) -> dict[str, Tensor]:
    """What gives the token's embedding back, normed: the target's head knows what follows it."""
    hidden, begin = target.config.hidden_size, "model.layers.0."
    layer = {name: torch.ones(hidden) for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")}
    layer["input_proj"] = torch.eye(2 * hidden)[hidden:].contiguous()
    layer = {f"{name}.weight": tensor for name, tensor in layer.items()}
    for name, tensor in target.state_dict().items():
        if name.startswith(begin):
            layer[name.removeprefix(begin)] = torch.ones(hidden) if "norm" in name else torch.zeros_like(tensor)
    return layer
