"""DFlash (arXiv 2602.06036): a drafter of Qwen3's layers that proposes a block of tokens in one pass.

Each layer has KV of the target's features at the positions that the target has computed. Behind these lies the block:
the sampled token, the *anchor*, and masks, each of which sees all of the block. The features of the last position lead
it as a row of their own, whose token is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from spool.engine.attention.backends import AttentionPlan
from spool.engine.attention.paged_step import signed_rotation
from spool.engine.cpu.kernels import CpuKernels
from spool.engine.drafting.head import DraftingHead, HeadWeights
from spool.engine.drafting.head_layer import HeadLayer
from spool.engine.drafting.speculators.blocks import Block
from spool.engine.drafting.speculators.config import read_drafter_config
from spool.engine.drafting.speculators.files import check_embedding, check_fits, layers_of, read_tensors, token_ids_of
from spool.engine.errors import UnsupportedModelError
from spool.engine.kv.paged_kv import PagedKv
from spool.engine.leftovers import changes_nothing, refuse_unused
from spool.engine.models.drafting_head import feature_layers

_FEATURES_ALONE = -1
"""Takes a token's place in the row that leads a block."""
_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"


class DflashHead(DraftingHead):
    at_once = True

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        vocabulary_size: int,
        kernels: CpuKernels | None,
        ignored: Sequence[str] = (),
    ) -> None:
        """Raises UnsupportedModelError as `EagleHead` does."""
        read, key = read_drafter_config(folder, ignored), "aux_hidden_state_layer_ids"
        if read.fields.get(key) is None:
            raise UnsupportedModelError(f"{folder.name}/config.json has no {key}")
        config, self.layers = layers_of(
            folder, read, lambda: feature_layers(folder, read.fields, model.config.num_hidden_layers, key, None)
        )
        super().__init__(folder.name, config, model, kernels)
        size, self._mask = read.fields["block_size"], read.fields["mask_token_id"]
        self._masks, self._from_anchor = size - 1, read.flag("sample_from_anchor")
        if self._masks + self._from_anchor < 1:
            raise UnsupportedModelError(f"{folder.name}: block_size is {size}, must be at least 2")
        check_fits(folder, read, config, model, windows=read.flag("sliding_window_non_causal"))
        check_embedding(folder, model)
        self._hidden, self._epsilon = config.hidden_size, config.rms_norm_eps
        self._rotary = Qwen3RotaryEmbedding(config).to(model.device)
        rows = read.fields["draft_vocab_size"]
        stored = read_tensors(folder, read, config, ignored)
        # As in the package itself, these are the target's, whatever the folder holds.
        stored.pop(_EMBEDDING, None)
        if rows == config.vocab_size:
            stored.pop(_LM_HEAD, None)
        self.token_ids = token_ids_of(folder, stored.pop("d2t", None), rows, vocabulary_size)
        self.columns = vocabulary_size if self.token_ids is None else rows
        weights, count = HeadWeights(folder, stored, model.dtype, model.device), len(self.layers)
        windows = [
            # At the end of the block, a row sees it and the window before the anchor.
            config.sliding_window + size if kind == "sliding_attention" and config.sliding_window else None
            for kind in config.layer_types
        ]
        self.has_windows = any(windows)
        self._decoder = [
            HeadLayer(weights, read.prefix.format(at), at, config, self.made, head_norms=True, window=window)
            for at, window in enumerate(windows)
        ]
        self._fc = self.made(weights.linear("fc", self._hidden, count * self._hidden))
        self._lm_head = None if rows == config.vocab_size else self.made(weights.linear("lm_head", rows, self._hidden))
        names = ("hidden_norm", "norm")
        self._features_norm, self._norm = (weights.tensor(f"{name}.weight", self._hidden) for name in names)
        self.nbytes = weights.nbytes
        refuse_unused(folder.name, (name for name in stored if not changes_nothing(name)), ignored)
        self.mask_features = torch.zeros_like(self._norm)
        if self.token_ids is not None:
            self.token_ids = self.token_ids.to(model.device)

    def block(self, sampled: int, length: int) -> Block:
        """Of one size, for which it was trained: all of it is seen."""
        first = 1 if self._from_anchor else 2
        tokens = [_FEATURES_ALONE, sampled, *[self._mask] * self._masks]
        return Block(tokens, range(first, min(first + length, len(tokens))), is_causal=False)

    def features(self, hidden: Tensor) -> Tensor:
        return torch.nan_to_num(self._normed(self._fc(hidden), self._features_norm))

    def write(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        kv: PagedKv,
        slots: Tensor,
        plan: AttentionPlan | None = None,
    ) -> None:
        rotation, places = signed_rotation(self._rotary(features, positions.unsqueeze(0))), kv.rows(slots)
        for layer in self._decoder:
            layer.write(features, rotation, kv, places)

    def outputs(
        self, tokens: Tensor, features: Tensor, positions: Tensor, kv: PagedKv, slots: Tensor, plan: AttentionPlan
    ) -> Tensor:
        rotation, places = signed_rotation(self._rotary(features, positions.unsqueeze(0))), kv.rows(slots)
        leads = (tokens == _FEATURES_ALONE).unsqueeze(1)
        hidden: Tensor = self._target.base_model.embed_tokens(tokens.clamp(min=0))
        for layer in self._decoder:
            queries = layer.write(torch.where(leads, features, layer.normed(hidden)), rotation, kv, places)
            hidden = layer.outputs(queries, hidden, kv, plan)
        return hidden

    def logits(self, outputs: Tensor) -> Tensor:
        lm_head = self._target.get_output_embeddings() if self._lm_head is None else self._lm_head
        found: Tensor = lm_head(self._normed(outputs, self._norm))[:, : self.columns]
        return found

    def _normed(self, rows: Tensor, norm: Tensor) -> Tensor:
        return F.rms_norm(rows, (self._hidden,), norm, self._epsilon)
