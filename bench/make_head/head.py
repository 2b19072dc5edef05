"""A drafting head to be trained, as EAGLE-3 describes it (arXiv 2503.01840), for a target of the Llama kind.

One decoder layer reads, at each position, features of the target and the embedding of the next token. The target's
embedding and head stay as they are: of the head, only the rows of a draft vocabulary are computed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

Keys = tuple[Tensor, Tensor]
"""Keys and values `[texts, heads, tokens, head_dim]`."""


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * hidden, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(2 * hidden, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * hidden, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, hidden, bias=False)
        self._group, self._size = config.num_attention_heads // config.num_key_value_heads, size

    def forward(self, rows: Tensor, rotation: tuple[Tensor, Tensor], before: list[Keys]) -> Tensor:
        """Rows `[texts, tokens, 2 * hidden]`. A row sees those of the first pass up to its own place, and of each later
        pass the one in its own place. This pass's keys are appended to `before`."""
        queries, keys, values = (
            part.unflatten(-1, (-1, self._size)).transpose(1, 2)
            for part in (self.q_proj(rows), self.k_proj(rows), self.v_proj(rows))
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotation)
        before.append((keys.repeat_interleave(self._group, 1), values.repeat_interleave(self._group, 1)))
        (first_keys, first_values), *later = before
        tokens = rows.shape[1]
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=rows.device).triu(1)
        scores = (queries @ first_keys.transpose(-1, -2)).float().masked_fill(hidden, float("-inf"))
        own = [(queries * keys).sum(-1, keepdim=True).float() for keys, _ in later]
        shares = (torch.cat([scores, *own], -1) * self._size**-0.5).softmax(-1).to(first_values.dtype)
        attended = shares[..., :tokens] @ first_values
        for place, (_, values) in enumerate(later, tokens):
            attended = attended + shares[..., place : place + 1] * values
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn = _Attention(config)
        self.mlp = LlamaMLP(config)

    def forward(
        self, embedded: Tensor, features: Tensor, rotation: tuple[Tensor, Tensor], before: list[Keys]
    ) -> Tensor:
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(features)), -1)
        hidden = features + self.self_attn(both, rotation, before)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class TrainedHead(nn.Module):
    """Its tensors have the names of published heads."""

    def __init__(self, target: PreTrainedModel, feature_layers: list[int]) -> None:
        """`feature_layers`: those of the target whose inputs are the features. Starts as the target's last layer, which
        reads the last of them."""
        super().__init__()
        config = target.config
        self.feature_layers = feature_layers
        self.fc = nn.Linear(len(feature_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self._rotary = LlamaRotaryEmbedding(config)
        self._start_as(target)

    @torch.no_grad()
    def _start_as(self, target: PreTrainedModel) -> None:
        decoder, hidden = target.get_decoder(), target.config.hidden_size
        last = decoder.layers[-1]
        self.fc.weight.zero_()
        self.fc.weight[:, -hidden:] = torch.eye(hidden)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(self.midlayer.self_attn, name).weight
            weight[:, :hidden].normal_(0, 0.02)
            weight[:, hidden:] = getattr(last.self_attn, name).weight
        self.midlayer.self_attn.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
        self.midlayer.mlp.load_state_dict(last.mlp.state_dict())
        self.midlayer.hidden_norm.load_state_dict(last.input_layernorm.state_dict())
        self.midlayer.post_attention_layernorm.load_state_dict(last.post_attention_layernorm.state_dict())
        self.norm.load_state_dict(decoder.norm.state_dict())

    def forward(self, states: Tensor, embedded: Tensor, passes: int) -> list[Tensor]:
        """What the head's logits are made of, after each of so many passes that follow one another, as when it
        proposes (the paper's training-time test).

        States `[texts, tokens, layers * hidden]` of the target, embeddings `[texts, tokens + passes - 1, hidden]` of
        the tokens behind them. Of pass p, row t `[texts, tokens, hidden]` is about the token t + p + 2.
        """
        features, tokens = self.fc(states), states.shape[1]
        before: list[Keys] = []
        found = []
        for number in range(passes):
            positions = torch.arange(number, number + tokens, device=states.device)[None]
            rotation = self._rotary(features, positions)
            features = self.midlayer(embedded[:, number : number + tokens], features, rotation, before)
            found.append(self.norm(features))
        return found
