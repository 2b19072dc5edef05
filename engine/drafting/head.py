"""What drafting heads have in common: decoder layers with KV on pages that read a token's embedding beside features,
which come from hidden states of the target or, from the second proposed token on, from the layers themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from spool.engine.attention.backends import AttentionPlan
from spool.engine.cpu.kernels import CpuKernels
from spool.engine.cpu.linear import kernel_linear
from spool.engine.drafting.speculators.blocks import Block
from spool.engine.errors import UnsupportedModelError
from spool.engine.kv.paged_kv import PagedKv
from spool.engine.layers.linear import linear_of
from spool.engine.models.loaded_model import KvShape
from spool.engine.models.weights import PLAIN_FLOATS, wrong_shape
from spool.engine.quantization.layers import QuantizedLinear
from spool.engine.quantization.model import is_quantized
from spool.engine.quantization.rounding import rounded
from spool.engine.quantization.weights import INPUT_MULTIPLE


class DraftingHead(ABC):
    """`layers`: those of the target whose inputs its features are made of; as many as the target has layers means
    behind its last norm. `token_ids`, int64 and ascending: the tokens of the `columns` of its logits; None for all of
    the target's. `nbytes`: of its weights."""

    layers: list[int]
    token_ids: Tensor | None = None
    columns: int
    nbytes: int
    attends_to_write = False
    """Whether KV of a pair depends on the pairs before it, as that of a second layer does."""
    at_once = False
    """Whether all tokens of a proposal come from one pass, over a `block`."""
    has_windows = False
    mask_features: Tensor
    """Features `[hidden]` of the rows of a block behind its first."""

    def __init__(
        self, name: str, config: PreTrainedConfig, target: PreTrainedModel, kernels: CpuKernels | None
    ) -> None:
        """`config`: of a model of the head's layers."""
        self.name = name
        self.config = config
        self._target, self._kernels, self._rounds = target, kernels, is_quantized(target)
        self._shape = KvShape.of(config)
        decoder = target.base_model
        layers = getattr(decoder, "layers", ())
        if len(layers) != target.config.num_hidden_layers or not hasattr(decoder, "embed_tokens"):
            family = target.config.model_type
            raise UnsupportedModelError(f"{name} needs a target with plain layers, {family} has none")

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    def bytes_per_page(self, page_size: int) -> int:
        """Of KV, and of the features that a page keeps."""
        dtype, shape = self._target.dtype, self._shape.for_kernels(self._kernels)
        return shape.layers * shape.bytes_of_layer(dtype) * page_size + self.hidden_size * dtype.itemsize

    def bytes_of_passes(self, rows: int) -> int:
        """What CUDA graphs of so many rows need: logits, where they are computed and where they stay, and what lies
        between layers."""
        return rows * (2 * self.columns + 16 * self.hidden_size) * self._target.dtype.itemsize

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, and dimensions of a head."""
        return self.config.num_attention_heads, self._shape.kv_heads, self._shape.head_dim

    def kv(self, pages: int, page_size: int) -> PagedKv:
        shape, like = self._shape.for_kernels(self._kernels), self._target
        return PagedKv(shape.layers, pages, page_size, shape.kv_heads, shape.head_dim, like.dtype, like.device)

    def made(self, linear: nn.Linear | QuantizedLinear) -> nn.Module:
        """What computes a linear layer: on a CPU, its kernels, beside a quantised target with weights of 8 bits, too. A
        pass of the head then takes half as long."""
        if self._kernels is None:
            return linear
        if self._rounds and isinstance(linear, nn.Linear) and linear.in_features % INPUT_MULTIPLE == 0:
            linear = QuantizedLinear(rounded(linear.weight.detach(), 8), linear.bias)
        return kernel_linear(linear, self._kernels)

    @abstractmethod
    def features(self, hidden: Tensor) -> Tensor:
        """Of hidden states `[rows, layers * hidden]`, one layer's after the other's: `[rows, hidden]`, finite."""

    @abstractmethod
    def write(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        kv: PagedKv,
        slots: Tensor,
        plan: AttentionPlan | None = None,
    ) -> None:
        """Writes KV of pairs, of a position's features `[rows, hidden]` and the token after it, to slots as in
        `PagedStep`. Whatever the features were, it is finite: it is with the head as long as its page is. `plan`: where
        the head `attends_to_write`."""

    def block(self, sampled: int, length: int) -> Block:
        """Of a proposal of up to `length` tokens behind the sampled one."""
        raise NotImplementedError

    @abstractmethod
    def outputs(
        self, tokens: Tensor, features: Tensor, positions: Tensor, kv: PagedKv, slots: Tensor, plan: AttentionPlan
    ) -> Tensor:
        """As `write`, and gives the features `[rows, hidden]` that go with the token after the next. Raises
        MemoryError."""

    @abstractmethod
    def logits(self, outputs: Tensor) -> Tensor:
        """`[rows, columns]` of the token after the next."""


class HeadWeights:
    """Takes tensors by their names, checked; `stored` are those that are left."""

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
        if tensor.dtype not in PLAIN_FLOATS.values():
            raise UnsupportedModelError(
                f"{self._folder.name}: {name} is of dtype {str(tensor.dtype).removeprefix('torch.')}, must be one of "
                f"{', '.join(PLAIN_FLOATS)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise UnsupportedModelError(f"{self._folder.name}: {name} holds a value that is not a finite number")
        tensor = tensor.to(self._device, self._dtype)
        self.nbytes += tensor.nbytes
        return tensor

    def linear(self, name: str, out_features: int, in_features: int) -> nn.Linear:
        bias = f"{name}.bias" in self.stored
        weight = self.tensor(f"{name}.weight", out_features, in_features)
        return linear_of(weight, self.tensor(f"{name}.bias", out_features) if bias else None)
