"""What drafting heads must propose by their published descriptions: plain torch, from the first token on each time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import PreTrainedModel


class ReferenceHead(ABC):
    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], target: PreTrainedModel) -> None:
        self.tensors = {name: each.float() if each.is_floating_point() else each for name, each in tensors.items()}
        self.config, self.target = config, target.float()

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
        features = self._features(states)[first:]
        following = known[1 + first :]
        while True:
            output = self._layer(following, features, first)
            yield self._logits(output[-1])
            following = torch.cat((following, torch.tensor(found[-1:])))
            features = torch.cat((features, output[-1:]))

    @abstractmethod
    def _features(self, states: Sequence[Tensor]) -> Tensor:
        """Of all hidden states of the target, `[1, tokens, hidden]` each."""

    @abstractmethod
    def _layer(self, tokens: Tensor, features: Tensor, first: int) -> Tensor:
        """`[pairs, hidden]`."""

    @abstractmethod
    def _logits(self, output: Tensor) -> dict[int, float]:
        """By token."""

    def _attention(self, name: str, rows: Tensor, first: int) -> Tensor:
        count, size = len(rows), self.config["head_dim"]
        queries, keys, values = (self._product(f"{name}.{one}_proj", rows).view(count, -1, size) for one in "qkv")
        if f"{name}.q_norm.weight" in self.tensors:
            queries, keys = self._norm(f"{name}.q_norm", queries), self._norm(f"{name}.k_norm", keys)
        positions = torch.arange(first, first + count)
        queries, keys = self._rotated(queries, positions), self._rotated(keys, positions)
        group = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / size**0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)
        return self._product(f"{name}.o_proj", attended)

    def _mlp(self, name: str, rows: Tensor) -> Tensor:
        gate, up = (self._product(f"{name}.{one}_proj", rows) for one in ("gate", "up"))
        return self._product(f"{name}.down_proj", silu(gate) * up)

    def _product(self, name: str, rows: Tensor) -> Tensor:
        return rows @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", torch.zeros(()))

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        scale = (rows.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return rows * scale * self.tensors[f"{name}.weight"]

    def _rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        size = int(self.config["head_dim"] * self.config.get("partial_rotary_factor", 1))
        half = size // 2
        angles = positions[:, None] * self.config["rope_theta"] ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second, rest = heads[..., :half], heads[..., half:size], heads[..., size:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
