"""EAGLE-3 heads (arXiv 2503.01840), in the format of SGLang and in that of speculators: their weights, and what they
compute with them.

Their features are hidden states of the target through `fc` or the output of their own layers for the position before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spool.engine.attention.backends import AttentionPlan
from spool.engine.attention.paged_step import signed_rotation
from spool.engine.cpu.kernels import CpuKernels
from spool.engine.drafting.head import DraftingHead, HeadWeights
from spool.engine.drafting.head_layer import HeadLayer
from spool.engine.drafting.speculators.config import DrafterConfig, read_drafter_config
from spool.engine.drafting.speculators.files import check_embedding, check_fits, layers_of, read_tensors, token_ids_of
from spool.engine.kv.paged_kv import PagedKv
from spool.engine.leftovers import changes_nothing, refuse_unused
from spool.engine.models.drafting_head import FEATURES, feature_layers, read_head_config, speculator_type


class EagleHead(DraftingHead):
    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        vocabulary_size: int,
        kernels: CpuKernels | None,
        ignored: Sequence[str] = (),
    ) -> None:
        """Raises UnsupportedModelError for a head that does not fit `model`, the target, or that holds tensors which
        nothing takes, but those of `ignored`."""
        read = _read_config(folder, ignored)
        count = None if read.is_speculator else FEATURES
        config, self.layers = layers_of(
            folder, read, lambda: feature_layers(folder, read.fields, model.config.num_hidden_layers, count=count)
        )
        super().__init__(folder.name, config, model, kernels)
        check_fits(folder, read, config, model)
        self.attends_to_write = config.num_hidden_layers > 1
        self._hidden, self._epsilon = config.hidden_size, config.rms_norm_eps
        self._norms_residual, self._norms_output = read.flag("norm_before_residual"), read.flag("norm_output")
        self._rotary = LlamaRotaryEmbedding(config).to(model.device)
        rows = read.fields.get("draft_vocab_size") or config.vocab_size
        stored = read_tensors(folder, read, config, ignored)
        self.token_ids = token_ids_of(folder, stored.pop("d2t", None), rows, vocabulary_size)
        self.columns = vocabulary_size if self.token_ids is None else rows
        weights = HeadWeights(folder, stored, model.dtype, model.device)
        self._take(weights, read, rows)
        refuse_unused(folder.name, (name for name in weights.stored if not changes_nothing(name)), ignored)
        if self.token_ids is not None:
            self.token_ids = self.token_ids.to(model.device)

    def features(self, hidden: Tensor) -> Tensor:
        if self._features_norm is not None:
            # Of all that a row holds, or of each layer's part.
            parts = hidden.view(len(hidden), -1, self._normed_at_once)
            normed = F.rms_norm(parts, (self._normed_at_once,), None, self._epsilon)
            hidden = (normed * self._features_norm).flatten(1)
        return torch.nan_to_num(self._fc(hidden))

    def write(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        kv: PagedKv,
        slots: Tensor,
        plan: AttentionPlan | None = None,
    ) -> None:
        self._computed(tokens, features, positions, kv, slots, plan, writes_only=True)

    def outputs(
        self, tokens: Tensor, features: Tensor, positions: Tensor, kv: PagedKv, slots: Tensor, plan: AttentionPlan
    ) -> Tensor:
        hidden = self._computed(tokens, features, positions, kv, slots, plan)
        return self._normed(hidden, self._norm) if self._norms_output else hidden

    def logits(self, outputs: Tensor) -> Tensor:
        normed = outputs if self._norms_output else self._normed(outputs, self._norm)
        found: Tensor = self._lm_head(normed)[:, : self.columns]
        return found

    def _computed(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        kv: PagedKv,
        slots: Tensor,
        plan: AttentionPlan | None,
        writes_only: bool = False,
    ) -> Tensor:
        """What comes out of the last layer, or of the one before it where that has but to write."""
        rotation = signed_rotation(self._rotary(features, positions.unsqueeze(0)))
        places, hidden = kv.rows(slots), features
        for number, layer in enumerate(self._decoder):
            if number == 0:
                normed = self._normed(features, self._hidden_norm)
                rows = torch.cat((layer.normed(self._embed(tokens)), normed), -1)
                residual = normed if self._norms_residual else features
            else:
                rows, residual = layer.normed(hidden), hidden
            queries = layer.write(rows, rotation, kv, places)
            if writes_only and number == len(self._decoder) - 1:
                break
            assert plan is not None, "the layer attends"
            hidden = layer.outputs(queries, residual, kv, plan)
        return hidden

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._embedding is not None:
            return F.embedding(tokens, self._embedding)
        embedded: Tensor = self._target.base_model.embed_tokens(tokens)
        return embedded

    def _normed(self, rows: Tensor, norm: Tensor) -> Tensor:
        return F.rms_norm(rows, (self._hidden,), norm, self._epsilon)

    def _take(self, weights: HeadWeights, read: DrafterConfig, rows: int) -> None:
        config, hidden, count = self.config, self._hidden, len(self.layers)
        head_norms = read.family == "qwen3"
        self._decoder = [
            HeadLayer(
                weights,
                read.prefix.format(number),
                number,
                config,
                self.made,
                head_norms,
                parts=2 if number == 0 else 1,
            )
            for number in range(config.num_hidden_layers)
        ]
        self._features_norm: Tensor | None = None
        self._normed_at_once = hidden
        if read.flag("norm_before_fc"):
            self._normed_at_once = count * hidden
            self._features_norm = weights.tensor("input_norm.weight", count * hidden)
        elif read.flag("fc_norm"):
            self._features_norm = torch.stack([weights.tensor(f"fc_norm.{at}.weight", hidden) for at in range(count)])
        self._fc = self.made(weights.linear("fc", hidden, count * hidden))
        self._lm_head = self.made(weights.linear("lm_head", rows, hidden))
        self._hidden_norm = weights.tensor(f"{read.prefix.format(0)}.hidden_norm.weight", hidden)
        self._norm = weights.tensor("norm.weight", hidden)
        own = "embed_tokens.weight"
        self._embedding = weights.tensor(own, config.vocab_size, hidden) if own in weights.stored else None
        if self._embedding is None and read.is_speculator:
            check_embedding(Path(self.name), self._target)
        self.nbytes = weights.nbytes


def _read_config(folder: Path, ignored: Sequence[str]) -> DrafterConfig:
    if speculator_type(folder) is not None:
        return read_drafter_config(folder, ignored)
    fields = read_head_config(folder)
    return DrafterConfig("llama", fields, fields, prefix="midlayer", is_speculator=False)
