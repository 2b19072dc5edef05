"""What the package speculators itself proposes for tiny drafters: written to a file that tests compare with.

Runs in an environment apart, with speculators 0.9.0 and what it imports, torch 2.13.0 and transformers 5.19.0, where
PYTHONPATH names the clone and its build/names: python -m tests.support.golden_speculators
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.model import SpeculatorModel
from speculators.models.dflash.core import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import core as peagle
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from tests.support.speculator_heads import GOLDEN, PROMPTS, fixed_prompt, fixed_target, fixed_tensor
from tests.support.tiny_models import VOCABULARY

LENGTH = 4
"""Tokens of a proposal."""
_LAYER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPE = {"rope_parameters": {"rope_theta": 500.0, "original_max_position_embeddings": 64, **_LLAMA3}}
_AUXILIARY, _MASK = "eagle_aux_hidden_state_layer_ids", {"mask_token_id": 91}
_WINDOWS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9, "use_sliding_window": True}
CASES: dict[str, tuple[str, type, dict[str, Any], dict[str, Any]]] = {
    "eagle3": ("eagle3", LlamaConfig, {}, {_AUXILIARY: [0, 1, 3]}),
    "eagle3, normed at once, all tokens, biases": (
        "eagle3",
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, **_ROPE},
        {_AUXILIARY: [0, 2], "norm_before_fc": True, "norm_before_residual": True, "draft_vocab_size": VOCABULARY},
    ),
    "eagle3.1": (
        "eagle3",
        Qwen3Config,
        {"num_hidden_layers": 2},
        {_AUXILIARY: [0, 1, 3], "fc_norm": True, "norm_output": True},
    ),
    "eagle3, the target's embedding": (
        "eagle3",
        LlamaConfig,
        {"num_hidden_layers": 3},
        {_AUXILIARY: [0, 1, 2, 3], "norm_output": True, "norm_before_residual": True},
    ),
    "peagle": ("peagle", LlamaConfig, {"num_hidden_layers": 2}, {_AUXILIARY: [0, 1, 3], **_MASK}),
    "peagle, all norms": (
        "peagle",
        Qwen3Config,
        {"num_hidden_layers": 1},
        {
            **{_AUXILIARY: [1, 2, 3], "fc_norm": True, "norm_before_residual": True, "norm_output": True},
            **{"draft_vocab_size": VOCABULARY, **_MASK},
        },
    ),
    "dflash": (
        "dflash",
        Qwen3Config,
        {"num_hidden_layers": 2},
        {"aux_hidden_state_layer_ids": [0, 1, 3], "block_size": 5, **_MASK},
    ),
    "dflash, from the anchor, all tokens, biases": (
        "dflash",
        Qwen3Config,
        {"num_hidden_layers": 1, "attention_bias": True},
        {
            **{"aux_hidden_state_layer_ids": [1, 2], "block_size": 4, "sample_from_anchor": True},
            **{"draft_vocab_size": VOCABULARY, **_MASK},
        },
    ),
    "dflash, windows": (
        "dflash",
        Qwen3Config,
        {"num_hidden_layers": 2, **_WINDOWS},
        {"aux_hidden_state_layer_ids": [0, 1, 3], "block_size": 5, "sliding_window_non_causal": True, **_MASK},
    ),
}
"""By their names: type, layers, and the configuration beside them."""
_CLASSES = {
    "eagle3": (Eagle3DraftModel, Eagle3SpeculatorConfig),
    "peagle": (peagle.PEagleDraftModel, peagle.PEagleSpeculatorConfig),
    "dflash": (DFlashDraftModel, DFlashSpeculatorConfig),
}


def drafter(kind: str, layers: type, of_layers: dict[str, Any], fields: dict[str, Any]) -> SpeculatorModel:
    layer_config = layers(**({"num_hidden_layers": 1} | _LAYER | of_layers))
    layer_config._attn_implementation = "eager"
    about = SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=LENGTH)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    model_class, config_class = _CLASSES[kind]
    sizes = {"draft_vocab_size": VOCABULARY // 2} | fields
    config = config_class(transformer_layer_config=layer_config, speculators_config=about, **sizes)
    return model_class(config).eval().float()


def saved(model: SpeculatorModel, without: set[str]) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Its configuration, and the shapes of its tensors, as the package writes them."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(Path(folder) / "model.safetensors")
    return config, {name: list(tensor.shape) for name, tensor in sorted(tensors.items()) if name not in without}


def give_weights(model: SpeculatorModel, stored: dict[str, list[int]], target: PreTrainedModel) -> None:
    """Those of the folder; what is not there is the target's, as in the package's `load_verifier_weights`."""
    weights = {name: fixed_tensor(name, shape) for name, shape in stored.items()}
    weights |= {"verifier_norm.weight": target.model.norm.weight}
    weights.setdefault("embed_tokens.weight", target.model.embed_tokens.weight)
    weights.setdefault("lm_head.weight", target.lm_head.weight)
    weights["verifier_lm_head.weight"] = torch.zeros_like(weights["lm_head.weight"])
    model.load_state_dict(weights)


class Oracle:
    """Proposals of a drafter, by its own training pass for one position."""

    def __init__(self, kind: str, model: SpeculatorModel, target: PreTrainedModel) -> None:
        self.kind, self.model, self.target = kind, model, target
        self.logits: list[Tensor] = []
        model.lm_head.register_forward_hook(lambda _, __, output: self.logits.append(output[0]))

    def features(self, tokens: list[int], more: int) -> Tensor:
        """Of the target's layers, followed by `more` rows that nothing may look at."""
        states = self.target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        chosen = torch.cat([states[layer] for layer in self.model.target_layer_ids], -1)
        return torch.cat((chosen, torch.full((1, more, chosen.shape[-1]), 1e3)), 1)

    def token(self, logits: Tensor) -> int:
        column = int(logits.argmax())
        return column if self.model.d2t is None else column + int(self.model.d2t[column])

    @torch.no_grad()
    def proposal(self, tokens: list[int]) -> list[Tensor]:
        """Logits of what follows `tokens`, of whose last one the target has computed nothing."""
        self.logits.clear()
        rows: list[Tensor] = getattr(self, f"_{self.kind}")(tokens)
        return rows

    def _eagle3(self, tokens: list[int]) -> list[Tensor]:
        """Steps of training take the true tokens, here those that were proposed."""
        features, known, last = self.features(tokens[:-1], LENGTH), tokens[1:], len(tokens) - 2
        found: list[Tensor] = []
        for step in range(1, LENGTH + 1):
            self.logits.clear()
            following = [*known, *map(self.token, found)]
            ids = torch.tensor([following + [0] * (features.shape[1] - len(following))])
            self.model(features, ids, torch.zeros_like(ids), ttt_steps=step)
            found = [logits[last] for logits in self.logits]
        return found

    def _peagle(self, tokens: list[int]) -> list[Tensor]:
        features, last = self.features(tokens[:-1], LENGTH), len(tokens) - 2
        count = features.shape[1]
        ids = torch.tensor([tokens[1:] + [0] * LENGTH])
        anchors = torch.tensor([*range(count), *[last] * (LENGTH - 1)])
        depths = torch.tensor([*[0] * count, *range(1, LENGTH)])
        with patch.object(peagle, "generate_cod_sample_indices", lambda **_: (anchors, depths)):
            self.model(
                features,
                ids,
                torch.zeros_like(ids),
                verifier_last_hidden_states=torch.zeros(1, count, 64),
                loss_config=resolve_loss_config("ce", "eager"),
                num_depths=LENGTH,
            )
        (logits,) = self.logits
        return [logits[last], *logits[count:]]

    def _dflash(self, tokens: list[int]) -> list[Tensor]:
        config, anchor = self.model.config, len(tokens) - 1
        features = self.features(tokens[:-1], 1 + 2 * config.block_size)
        ids = torch.tensor([tokens + [0] * 2 * config.block_size])
        wanted = torch.zeros(ids.shape)
        wanted[0, anchor] = 1
        _, logits, *_ = self.model._backbone_forward(
            features, ids, wanted, torch.zeros(*ids.shape, 64), torch.zeros_like(ids), max_anchors=1
        )
        return [*logits[0, 0 if config.sample_from_anchor else 1 :]]


def main() -> None:
    target, written = fixed_target(), {}
    for name, (kind, layers, of_layers, fields) in CASES.items():
        model = drafter(kind, layers, of_layers, fields)
        config, shapes = saved(model, {"embed_tokens.weight"} if "the target's embedding" in name else set())
        give_weights(model, shapes, target)
        oracle, proposals = Oracle(kind, model, target), []
        for length in PROMPTS:
            prompt = fixed_prompt(length)
            # What the target samples is the first token that a drafter is given.
            prompt.append(int(target(torch.tensor([prompt])).logits[0, -1].argmax()))
            rows = oracle.proposal(prompt)
            proposals.append([oracle.token(row) for row in rows])
            logits = [[float(f"{number:.5g}") for number in row.tolist()] for row in rows]
        # Logits of the last prompt alone, to keep the file small.
        written[name] = {"config": config, "tensors": shapes, "proposals": proposals, "logits": logits}
        print(name, proposals)
    lines = (f"{json.dumps(name)}: {json.dumps(case)}" for name, case in written.items())
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
