"""EAGLE-3 heads for tiny targets, and what they must propose, computed in plain torch without any cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

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


class ReferenceHead:
    """What the published description says, from the first token on each time."""

    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.tensors = load_file(folder / "model.safetensors")
        self.target = target.float()

    @torch.no_grad()
    def proposal(self, tokens: Sequence[int], length: int, first: int = 0) -> list[int]:
        """What follows `tokens` greedily, where the head knows pairs from position `first` on."""
        found: list[int] = []
        for logits in islice(self._passes(tokens, found, first), length):
            found.append(max(logits, key=lambda token: logits[token]))
        return found

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> dict[int, float]:
        """Of what follows `tokens`, by token."""
        return next(self._passes(tokens, [], 0))

    def _passes(self, tokens: Sequence[int], found: list[int], first: int) -> Iterator[dict[int, float]]:
        """Logits by token, one pass after the other; `found` grows by a token after each."""
        known = torch.tensor(tokens)
        states = self.target(known[None, :-1], output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][0] for layer in self.config["eagle_aux_hidden_state_layer_ids"]], -1)
        features = (features @ self.tensors["fc.weight"].T)[first:]
        following = known[1 + first :]
        while True:
            output = self._layer(following, features, first)
            logits = (self._norm("norm", output[-1]) @ self.tensors["lm_head.weight"].T).tolist()
            yield {column + int(self.tensors["d2t"][column]): value for column, value in enumerate(logits)}
            following = torch.cat((following, torch.tensor(found[-1:])))
            features = torch.cat((features, output[-1:]))

    def _layer(self, tokens: Tensor, features: Tensor, first: int) -> Tensor:
        config, count = self.config, len(tokens)
        own = self.tensors.get("embed_tokens.weight")
        embedding = self.target.get_input_embeddings().weight if own is None else own
        normed = self._norm("midlayer.hidden_norm", features)
        both = torch.cat((self._norm("midlayer.input_layernorm", embedding[tokens]), normed), -1)
        queries, keys, values = (
            (both @ self.tensors[f"midlayer.self_attn.{name}_proj.weight"].T).view(count, -1, config["head_dim"])
            for name in "qkv"
        )
        positions = torch.arange(first, first + count)
        queries, keys = self._rotated(queries, positions), self._rotated(keys, positions)
        group = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / config["head_dim"] ** 0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)
        residual = normed if config.get("norm_before_residual") else features
        hidden = residual + attended @ self.tensors["midlayer.self_attn.o_proj.weight"].T
        rows = self._norm("midlayer.post_attention_layernorm", hidden)
        gate, up = (rows @ self.tensors[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return hidden + (torch.nn.functional.silu(gate) * up) @ self.tensors["midlayer.mlp.down_proj.weight"].T

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        scale = (rows.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return rows * scale * self.tensors[f"{name}.weight"]

    def _rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        half = self.config["head_dim"] // 2
        angles = positions[:, None] * self.config["rope_theta"] ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = heads[..., :half], heads[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def save_agreeing_pair(folder: Path, vocabulary: int = 96, layers: int = 4, hidden: int = 128) -> tuple[Path, Path]:
    """A target whose next token nearly always is a permutation of the last one, with a head that knows it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    target = LlamaForCausalLM(config)
    order = torch.randperm(vocabulary)
    after = torch.empty_like(order).scatter_(0, order, order.roll(-1))
    """The token that follows each one."""
    one_hot, scale = torch.eye(vocabulary, hidden), hidden**0.5
    next_of = torch.zeros(vocabulary, hidden).index_copy_(0, after, one_hot)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.normal_(0, 0.003 if "o_proj" in name or "down_proj" in name else 0.25)
        target.model.embed_tokens.weight.copy_(one_hot * 4)
        target.lm_head.weight.copy_(next_of)
    target_folder, head_folder = folder / "agreeing-target", folder / "agreeing-head"
    target.save_pretrained(target_folder)
    fields = head_config(target, draft_vocab_size=vocabulary, intermediate_size=vocabulary)
    tensors = head_tensors(fields)
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
    return target_folder, save_head(head_folder, fields, tensors)
