"""The weights of an EAGLE-3 head (arXiv 2503.01840) and what it computes with them: one decoder layer.

The layer reads a token's embedding beside features, which are three hidden states of the target through `fc` or, from
the second proposed token on, the layer's own output for the position before.
"""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.attention.backends import AttentionBackend, AttentionPlan, AttentionRule, MatmulBackend, unrestricted_form
from engine.attention.paged_step import signed_rotation
from engine.cpu.attention import KernelBackend
from engine.cpu.kernels import CpuKernels
from engine.cpu.linear import prepack_linear
from engine.errors import UnsupportedModelError, one_line
from engine.kv.paged_kv import PagedKv
from engine.layers.linear import joined, linear_of
from engine.models.compatibility import has_moving_rope
from engine.models.drafting_head import FEATURES, feature_layers, read_head_config
from engine.models.weights import safetensors_files, wrong_shape

_PICKLED = "pytorch_model.bin"
_UNUSED = "t2d"
"""A mask of the target's tokens, which `d2t` says as well."""


class EagleHead:
    """`token_ids`, int64 and ascending: the tokens of the columns of its logits; None for all of the target's.
    `layers`: those of the target whose inputs are its features."""

    def __init__(self, folder: Path, model: PreTrainedModel, vocabulary_size: int, kernels: CpuKernels | None) -> None:
        """Raises UnsupportedModelError for a head that does not fit `model`, the target."""
        fields = read_head_config(folder)
        try:
            config = LlamaConfig.from_dict(fields)
            self.layers = feature_layers(folder, fields, model.config.num_hidden_layers)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise UnsupportedModelError(f"{folder.name}/config.json cannot be used: {one_line(error)}") from error
        self._check(folder, config, model)
        self.name = folder.name
        self.config = config
        self._kernels, self._target = kernels, model
        self._hidden, self._epsilon = config.hidden_size, config.rms_norm_eps
        self._head_dim = config.head_dim
        self._norms_residual = bool(fields.get("norm_before_residual"))
        self._activation = ACT2FN[config.hidden_act]
        self._rule = AttentionRule(self._head_dim**-0.5)
        self._rotary = LlamaRotaryEmbedding(config).to(model.device)
        rows = fields.get("draft_vocab_size") or config.vocab_size
        stored = {name: tensor for name, tensor in _tensors(folder).items() if name != _UNUSED}
        self.token_ids = _token_ids(folder, stored.pop("d2t", None), rows, vocabulary_size)
        self._columns = vocabulary_size if self.token_ids is None else rows
        self._take(folder, _Weights(folder, stored, model.dtype, model.device), rows)
        if self.token_ids is not None:
            self.token_ids = self.token_ids.to(model.device)

    def bytes_per_page(self, page_size: int) -> int:
        """Of KV, and of the features that a page keeps."""
        keys = self.config.num_key_value_heads * self._head_dim
        return (2 * keys * page_size + self._hidden) * self._target.dtype.itemsize

    def kv(self, pages: int, page_size: int) -> PagedKv:
        heads, like = self.config.num_key_value_heads, self._target
        return PagedKv(1, pages, page_size, heads, self._head_dim, like.dtype, like.device)

    def backend(self, kv: PagedKv) -> AttentionBackend:
        """By kernel on a CPU, where one takes the sizes; else by matrix products, on a GPU as well."""
        config, page_size = self.config, kv.page_size
        if self._kernels is not None and KernelBackend.supports(self._head_dim, page_size):
            return KernelBackend(self._kernels, page_size)
        heads, form = (config.num_attention_heads, config.num_key_value_heads), unrestricted_form(page_size)
        return MatmulBackend(form, *heads, page_size, self._target.device)

    def features(self, hidden: Tensor) -> Tensor:
        """Of hidden states `[rows, 3 * hidden]`, one layer's after the other's: `[rows, hidden]`."""
        return torch.nan_to_num(self._fc(hidden))

    def write(self, tokens: Tensor, features: Tensor, positions: Tensor, kv: PagedKv, slots: Tensor) -> Tensor:
        """Writes KV of pairs, of a position's features `[rows, hidden]` and the token after it, to slots as in
        `PagedStep`. Gives queries `[rows, heads, head_dim]`."""
        both = torch.cat((self._normed(self._embed(tokens), 0), self._normed(features, 1)), -1)
        heads = self._qkv(both).view(len(both), -1, self._head_dim)
        cos, signed_sin = signed_rotation(self._rotary(both, positions.unsqueeze(0)))
        queries, rotated = self.config.num_attention_heads, -self.config.num_key_value_heads
        exact = heads[:, :rotated].float()
        exact = torch.addcmul(exact * cos, torch.roll(exact, self._head_dim // 2, -1), signed_sin).to(heads.dtype)
        # Whatever the features were: what is not finite would be with the head as long as its page is.
        keys, values = (torch.nan_to_num(part).flatten(0, 1) for part in (exact[:, queries:], heads[:, rotated:]))
        kv.layers[0].write(kv.rows(slots), keys, values)
        return exact[:, :queries]

    def propose(
        self, tokens: Tensor, features: Tensor, positions: Tensor, kv: PagedKv, slots: Tensor, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """As `write`, and gives logits `[rows, tokens]` of the token after the next, and the features that go with it.
        Raises MemoryError."""
        queries = self.write(tokens, features, positions, kv, slots)
        attended = self._out(plan.attend(kv.layers[0], queries, self._rule).flatten(1))
        hidden = attended + (self._normed(features, 1) if self._norms_residual else features)
        gate, up = self._gate_up(self._normed(hidden, 2)).chunk(2, -1)
        hidden = hidden + self._down(self._activation(gate) * up)
        return self._lm_head(self._normed(hidden, 3))[:, : self._columns], hidden

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._embedding is not None:
            return F.embedding(tokens, self._embedding)
        embedded: Tensor = self._target.base_model.embed_tokens(tokens)
        return embedded

    def _normed(self, rows: Tensor, which: int) -> Tensor:
        return F.rms_norm(rows, (self._hidden,), self._norms[which], self._epsilon)

    @staticmethod
    def _check(folder: Path, config: LlamaConfig, model: PreTrainedModel) -> None:
        target, decoder = model.config, model.base_model
        layers = getattr(decoder, "layers", ())
        if len(layers) != target.num_hidden_layers or not hasattr(decoder, "embed_tokens"):
            raise UnsupportedModelError(f"{folder.name} needs a target with plain layers, {target.model_type} has none")
        for name, own in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
            if getattr(config, name) != own:
                raise UnsupportedModelError(
                    f"{folder.name} does not fit the target: {name} is {getattr(config, name)}, must be {own}"
                )
        if config.num_hidden_layers != 1 or has_moving_rope(config):
            kind = (config.rope_parameters or {}).get("rope_type")
            raise UnsupportedModelError(
                f"{folder.name} has {config.num_hidden_layers} layers with positions of type {kind}, must have 1 with "
                "fixed frequencies"
            )

    def _take(self, folder: Path, weights: _Weights, rows: int) -> None:
        config, hidden, inner = self.config, self._hidden, self.config.intermediate_size
        queries, keys = config.num_attention_heads * self._head_dim, config.num_key_value_heads * self._head_dim
        attention = [
            weights.linear(f"midlayer.self_attn.{name}_proj", size, 2 * hidden)
            for name, size in (("q", queries), ("k", keys), ("v", keys))
        ]
        gates = [weights.linear(f"midlayer.mlp.{name}_proj", inner, hidden) for name in ("gate", "up")]
        self._fc = self._made(weights.linear("fc", hidden, FEATURES * hidden))
        self._qkv = self._made(joined(attention))
        self._out = self._made(weights.linear("midlayer.self_attn.o_proj", hidden, queries))
        self._gate_up = self._made(joined(gates))
        self._down = self._made(weights.linear("midlayer.mlp.down_proj", hidden, inner))
        self._lm_head = self._made(weights.linear("lm_head", rows, hidden))
        names = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
        self._norms = [weights.tensor(f"{name}.weight", hidden) for name in names]
        own = "embed_tokens.weight"
        self._embedding = weights.tensor(own, config.vocab_size, hidden) if own in weights.stored else None
        self.nbytes = weights.nbytes
        if weights.stored:
            raise UnsupportedModelError(f"{folder.name} holds {', '.join(sorted(weights.stored)[:3])}: not of EAGLE-3")

    def _made(self, linear: nn.Module) -> nn.Module:
        return prepack_linear(linear, self._kernels)


class _Weights:
    """Takes tensors by their names, checked."""

    def __init__(self, folder: Path, stored: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self.stored = stored
        self.nbytes = 0
        self._folder, self._dtype, self._device = folder, dtype, device

    def tensor(self, name: str, *shape: int) -> Tensor:
        if name not in self.stored:
            raise UnsupportedModelError(f"{self._folder.name} holds no {name}")
        tensor = self.stored.pop(name)
        if tuple(tensor.shape) != shape:
            raise wrong_shape(self._folder.name, name, tensor.shape, shape)
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise UnsupportedModelError(f"{self._folder.name}: {name} holds a value that is not a finite number")
        tensor = tensor.to(self._device, self._dtype)
        self.nbytes += tensor.nbytes
        return tensor

    def linear(self, name: str, out_features: int, in_features: int) -> nn.Linear:
        bias = f"{name}.bias" in self.stored
        weight = self.tensor(f"{name}.weight", out_features, in_features)
        return linear_of(weight, self.tensor(f"{name}.bias", out_features) if bias else None)


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
