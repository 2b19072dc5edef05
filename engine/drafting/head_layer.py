"""A decoder layer of a drafting head, of Llama's kind or, with norms of heads, of Qwen3's."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from spool.engine.attention.backends import AttentionPlan, AttentionRule
from spool.engine.drafting.head import HeadWeights
from spool.engine.kv.paged_kv import PagedKv
from spool.engine.layers.linear import joined

Rotation = tuple[Tensor, Tensor]
"""As `signed_rotation` gives it."""


class HeadLayer:
    def __init__(
        self,
        weights: HeadWeights,
        prefix: str,
        number: int,
        config: PreTrainedConfig,
        made: Callable[[nn.Module], nn.Module],
        head_norms: bool = False,
        parts: int = 1,
        window: int | None = None,
    ) -> None:
        """Tensors of names that begin with `prefix`; KV is that of layer `number` on the pages. Attention reads rows of
        `parts * hidden`. `made` as `DraftingHead.made`; `window` as in `AttentionRule`."""
        hidden, inner = config.hidden_size, config.intermediate_size
        self._head_dim, self._hidden, self._epsilon = config.head_dim, hidden, config.rms_norm_eps
        self._query_heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        queries, keys = (count * self._head_dim for count in (self._query_heads, self._kv_heads))
        self._number = number
        attention = [
            weights.linear(f"{prefix}.self_attn.{name}_proj", size, parts * hidden)
            for name, size in (("q", queries), ("k", keys), ("v", keys))
        ]
        gates = [weights.linear(f"{prefix}.mlp.{name}_proj", inner, hidden) for name in ("gate", "up")]
        self._qkv = made(joined(attention))
        self._out = made(weights.linear(f"{prefix}.self_attn.o_proj", hidden, queries))
        self._gate_up = made(joined(gates))
        self._down = made(weights.linear(f"{prefix}.mlp.down_proj", hidden, inner))
        names = ("input_layernorm", "post_attention_layernorm")
        self._input_norm, self._mlp_norm = (weights.tensor(f"{prefix}.{name}.weight", hidden) for name in names)
        self._head_norms: Tensor | None = None
        """One for each head, of queries first."""
        if head_norms:
            each = [weights.tensor(f"{prefix}.self_attn.{name}_norm.weight", self._head_dim) for name in "qk"]
            counts = (self._query_heads, self._kv_heads)
            self._head_norms = torch.cat([norm.expand(count, -1) for norm, count in zip(each, counts, strict=True)])
        self._activation = ACT2FN[config.hidden_act]
        self._rule = AttentionRule(self._head_dim**-0.5, window)

    def normed(self, rows: Tensor) -> Tensor:
        """Rows `[rows, hidden]` as attention reads them."""
        return F.rms_norm(rows, (self._hidden,), self._input_norm, self._epsilon)

    def write(self, rows: Tensor, rotation: Rotation, kv: PagedKv, places: Tensor) -> Tensor:
        """Finite KV of rows to `places`, those of `PagedKv.rows`; gives queries `[rows, heads, head_dim]`."""
        heads = self._qkv(rows).view(len(rows), -1, self._head_dim)
        cos, signed_sin = rotation
        exact = heads[:, : -self._kv_heads].float()
        if self._head_norms is not None:
            exact = F.rms_norm(exact, (self._head_dim,), None, self._epsilon) * self._head_norms
        exact = torch.addcmul(exact * cos, torch.roll(exact, self._head_dim // 2, -1), signed_sin).to(heads.dtype)
        keys, values = (
            torch.nan_to_num(part).flatten(0, 1)
            for part in (exact[:, self._query_heads :], heads[:, -self._kv_heads :])
        )
        kv.layers[self._number].write(places, keys, values)
        return exact[:, : self._query_heads]

    def outputs(self, queries: Tensor, residual: Tensor, kv: PagedKv, plan: AttentionPlan) -> Tensor:
        """`[rows, hidden]`, of what `write` gave."""
        attended = self._out(plan.attend(kv.layers[self._number], queries, self._rule).flatten(1))
        hidden: Tensor = attended + residual
        gate, up = self._gate_up(F.rms_norm(hidden, (self._hidden,), self._mlp_norm, self._epsilon)).chunk(2, -1)
        output: Tensor = hidden + self._down(self._activation(gate) * up)
        return output
