"""The weights of an EAGLE-3 head (arXiv 2503.01840) and what it computes with them: one decoder layer.

Its features are three hidden states of the target through `fc` or the layer's own output for the position before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spool.engine.attention.backends import AttentionPlan, AttentionRule
from spool.engine.attention.paged_step import signed_rotation
from spool.engine.cpu.kernels import CpuKernels
from spool.engine.drafting.head import DraftingHead, HeadWeights
from spool.engine.errors import UnsupportedModelError, one_line
from spool.engine.kv.paged_kv import PagedKv
from spool.engine.layers.linear import joined
from spool.engine.leftovers import changes_nothing, refuse_unused
from spool.engine.models.compatibility import check_sizes, has_moving_rope
from spool.engine.models.drafting_head import FEATURES, feature_layers, read_head_config
from spool.engine.models.weights import safetensors_files, wrong_shape

_PICKLED = "pytorch_model.bin"
_UNUSED = "t2d"
"""A mask of the target's tokens, which `d2t` says as well."""


class EagleHead(DraftingHead):
    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        vocabulary_size: int,
        kernels: CpuKernels | None,
        ignored: Sequence[str] = (),
        rounds: bool = False,
    ) -> None:
        """Raises UnsupportedModelError for a head that does not fit `model`, the target, or that holds tensors which
        nothing takes, but those of `ignored`. `rounds`: its weights to 8 bits, on a CPU."""
        fields = read_head_config(folder)
        try:
            config = LlamaConfig.from_dict(fields)
            check_sizes(config)
            self.layers = feature_layers(folder, fields, model.config.num_hidden_layers)
        except (TypeError, ValueError, AttributeError, KeyError, StrictDataclassError, UnsupportedModelError) as error:
            raise UnsupportedModelError(f"{folder.name}/config.json cannot be used: {one_line(error)}") from error
        super().__init__(folder.name, config, model, kernels, rounds)
        self._check(model)
        self._hidden, self._epsilon = config.hidden_size, config.rms_norm_eps
        self._head_dim = config.head_dim
        self._norms_residual = bool(fields.get("norm_before_residual"))
        self._activation = ACT2FN[config.hidden_act]
        self._rule = AttentionRule(self._head_dim**-0.5)
        self._rotary = LlamaRotaryEmbedding(config).to(model.device)
        rows = fields.get("draft_vocab_size") or config.vocab_size
        stored = {name: tensor for name, tensor in _tensors(folder).items() if name != _UNUSED}
        self.token_ids = _token_ids(folder, stored.pop("d2t", None), rows, vocabulary_size)
        self.columns = vocabulary_size if self.token_ids is None else rows
        weights = HeadWeights(folder, stored, model.dtype, model.device)
        self._take(weights, rows)
        refuse_unused(folder.name, (name for name in weights.stored if not changes_nothing(name)), ignored)
        if self.token_ids is not None:
            self.token_ids = self.token_ids.to(model.device)

    def features(self, hidden: Tensor) -> Tensor:
        return torch.nan_to_num(self._fc(hidden))

    def write(self, tokens: Tensor, features: Tensor, positions: Tensor, kv: PagedKv, slots: Tensor) -> None:
        self._write(tokens, features, positions, kv, slots)

    def _write(self, tokens: Tensor, features: Tensor, positions: Tensor, kv: PagedKv, slots: Tensor) -> Tensor:
        """Gives queries `[rows, heads, head_dim]`."""
        both = torch.cat((self._normed(self._embed(tokens), 0), self._normed(features, 1)), -1)
        heads = self._qkv(both).view(len(both), -1, self._head_dim)
        cos, signed_sin = signed_rotation(self._rotary(both, positions.unsqueeze(0)))
        queries, rotated = self.config.num_attention_heads, -self.config.num_key_value_heads
        exact = heads[:, :rotated].float()
        exact = torch.addcmul(exact * cos, torch.roll(exact, self._head_dim // 2, -1), signed_sin).to(heads.dtype)
        keys, values = (torch.nan_to_num(part).flatten(0, 1) for part in (exact[:, queries:], heads[:, rotated:]))
        kv.layers[0].write(kv.rows(slots), keys, values)
        return exact[:, :queries]

    def propose(
        self, tokens: Tensor, features: Tensor, positions: Tensor, kv: PagedKv, slots: Tensor, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        queries = self._write(tokens, features, positions, kv, slots)
        attended = self._out(plan.attend(kv.layers[0], queries, self._rule).flatten(1))
        hidden = attended + (self._normed(features, 1) if self._norms_residual else features)
        gate, up = self._gate_up(self._normed(hidden, 2)).chunk(2, -1)
        hidden = hidden + self._down(self._activation(gate) * up)
        return self._lm_head(self._normed(hidden, 3))[:, : self.columns], hidden

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._embedding is not None:
            return F.embedding(tokens, self._embedding)
        embedded: Tensor = self._target.base_model.embed_tokens(tokens)
        return embedded

    def _normed(self, rows: Tensor, which: int) -> Tensor:
        return F.rms_norm(rows, (self._hidden,), self._norms[which], self._epsilon)

    def _check(self, model: PreTrainedModel) -> None:
        target, config = model.config, self.config
        for name, own in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
            if getattr(config, name) != own:
                raise UnsupportedModelError(
                    f"{self.name} does not fit the target: {name} is {getattr(config, name)}, must be {own}"
                )
        if config.num_hidden_layers != 1 or has_moving_rope(config):
            kind = (config.rope_parameters or {}).get("rope_type")
            raise UnsupportedModelError(
                f"{self.name} has {config.num_hidden_layers} layers with positions of type {kind}, must have 1 with "
                "fixed frequencies"
            )

    def _take(self, weights: HeadWeights, rows: int) -> None:
        config, hidden, inner = self.config, self._hidden, self.config.intermediate_size
        queries, keys = config.num_attention_heads * self._head_dim, config.num_key_value_heads * self._head_dim
        attention = [
            weights.linear(f"midlayer.self_attn.{name}_proj", size, 2 * hidden)
            for name, size in (("q", queries), ("k", keys), ("v", keys))
        ]
        gates = [weights.linear(f"midlayer.mlp.{name}_proj", inner, hidden) for name in ("gate", "up")]
        self._fc = self.made(weights.linear("fc", hidden, FEATURES * hidden))
        self._qkv = self.made(joined(attention))
        self._out = self.made(weights.linear("midlayer.self_attn.o_proj", hidden, queries))
        self._gate_up = self.made(joined(gates))
        self._down = self.made(weights.linear("midlayer.mlp.down_proj", hidden, inner))
        self._lm_head = self.made(weights.linear("lm_head", rows, hidden))
        names = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
        self._norms = [weights.tensor(f"{name}.weight", hidden) for name in names]
        own = "embed_tokens.weight"
        self._embedding = weights.tensor(own, config.vocab_size, hidden) if own in weights.stored else None
        self.nbytes = weights.nbytes


def _tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    try:
        for file in safetensors_files(folder):
            found |= load_file(file)
        if not found:
            found = torch.load(folder / _PICKLED, map_location="cpu", weights_only=True)
    # Damaged files of either kind.
    except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError, SafetensorError) as error:
        raise UnsupportedModelError(f"the weights of {folder.name} cannot be read: {one_line(error)}") from error
    return found


def _token_ids(folder: Path, offsets: Tensor | None, rows: int, vocabulary_size: int) -> Tensor | None:
    """Of `d2t`, which says of each column how much further the target's token is; columns past the vocabulary mean
    nothing."""
    if rows >= vocabulary_size and (offsets is None or not bool(offsets.any())):
        return None
    if offsets is None:
        raise UnsupportedModelError(f"{folder.name} holds no d2t, which {rows} of {vocabulary_size} tokens need")
    if tuple(offsets.shape) != (rows,):
        raise wrong_shape(folder.name, "d2t", offsets.shape, (rows,))
    tokens = torch.arange(rows) + offsets.to(torch.int64)
    if bool((tokens.diff() < 1).any()) or int(tokens[0]) < 0 or int(tokens[-1]) >= vocabulary_size:
        raise UnsupportedModelError(
            f"{folder.name}: d2t must name tokens of the target's {vocabulary_size}, each once and in ascending order"
        )
    return tokens
