"""Layers of which each rank has a part, for models whose other layers need not know of ranks."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from spool.engine.parallel.ranks import Ranks


class SummedLayer(nn.Module):
    """A layer of which each rank computes a summand."""

    def __init__(self, part: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.part = part
        self.ranks = ranks

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.ranks.total(self.part(rows)).to(rows.dtype)


class SummedLinear(SummedLayer):
    """A linear layer `[..., inputs of this rank]` to `[..., out_features]`: each rank has some of the inputs."""

    def __init__(self, part: nn.Module, ranks: Ranks) -> None:
        super().__init__(part, ranks)
        self.in_features = part.in_features
        self.out_features = part.out_features


class SplitEmbedding(nn.Module):
    """The embeddings of `tokens` tokens, of which each rank has equally many, one rank after the other."""

    def __init__(self, part: nn.Embedding, tokens: int, ranks: Ranks) -> None:
        super().__init__()
        self.part = part
        self.num_embeddings = tokens
        self._first = ranks.rank * part.num_embeddings
        self._ranks = ranks

    @property
    def weight(self) -> torch.Tensor:
        """Those of this rank."""
        return self.part.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = tokens - self._first
        elsewhere = (places < 0) | (places >= self.part.num_embeddings)
        rows = self.part(places.masked_fill(elsewhere, 0))
        return self._ranks.total(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


class SplitHead(nn.Module):
    """The logits of `tokens` tokens, of which each rank computes equally many, one after the other. Rank 0 has them
    all, the others their own."""

    def __init__(self, part: nn.Module, tokens: int, ranks: Ranks) -> None:
        super().__init__()
        self.part = part
        self._tokens = tokens
        self._ranks = ranks

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._ranks.side_by_side(self.part(rows))[..., : self._tokens]


def connect_layers(model: PreTrainedModel, tokens: int, ranks: Ranks) -> None:
    """Makes the parts of a model of `tokens` tokens (engine/parallel/shards.py) compute the whole of it, in place."""
    for layer in model.base_model.layers:
        layer.self_attn.o_proj = SummedLinear(layer.self_attn.o_proj, ranks)
        if hasattr(layer.mlp, "down_proj"):
            layer.mlp.down_proj = SummedLinear(layer.mlp.down_proj, ranks)
        else:
            # Every rank chooses the same experts, of which it has a part each.
            layer.mlp = SummedLayer(layer.mlp, ranks)
    model.set_output_embeddings(SplitHead(model.get_output_embeddings(), tokens, ranks))
    model.set_input_embeddings(SplitEmbedding(model.get_input_embeddings(), tokens, ranks))
