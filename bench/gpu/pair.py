"""A target and a draft with random weights, made in the device's memory, that agree as often as is asked for.

Row perm(t) of a model's head is the embedding of token t, so that token t is followed by perm(t): all that the layers
add to the residual stream is too quiet to change an argmax, and moves the logits' bits all the same. Target and draft
share perm and a head each. Of a share 1 - agreement of the tokens, drawn at random, the draft's embeddings are moved
around among them, so that it takes one for another there: each drafted token is the target's with that probability,
whatever came before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3Config

from spool.engine.attention.paged_step import ATTENTION_NAME

# The largest logit of a row; the others spread around 0 with a deviation of this over the square root of the width.
_LARGEST_LOGIT = 16.0
# What a layer's attention, or its MLP, adds to the residual stream, beside the embedding.
_LOUDNESS = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    target: PreTrainedConfig
    draft: PreTrainedConfig


def _qwen3(vocabulary: int, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], most: int) -> Any:
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=heads[2],
        max_position_embeddings=most,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


SHAPES: dict[str, Callable[[], Shape]] = {
    # Qwen/Qwen3-8B and Qwen/Qwen3-0.6B, the latter with a head of its own.
    "qwen3-8b": lambda: Shape(
        _qwen3(151936, 4096, 12288, 36, (32, 8, 128), 40960), _qwen3(151936, 1024, 3072, 28, (16, 8, 128), 40960)
    ),
    "qwen3-0.6b": lambda: Shape(
        _qwen3(151936, 1024, 3072, 28, (16, 8, 128), 40960), _qwen3(151936, 384, 1024, 6, (6, 2, 64), 40960)
    ),
    # The sizes of HuggingFaceTB/SmolLM2-135M, -360M and -1.7B and of Qwen/Qwen3-4B, each with a draft of a tenth.
    "smollm2-135m": lambda: Shape(
        _qwen3(49152, 576, 1536, 30, (9, 3, 64), 8192), _qwen3(49152, 192, 512, 4, (3, 1, 64), 8192)
    ),
    "smollm2-360m": lambda: Shape(
        _qwen3(49152, 960, 2560, 32, (15, 5, 64), 8192), _qwen3(49152, 384, 1024, 6, (6, 2, 64), 8192)
    ),
    "smollm2-1.7b": lambda: Shape(
        _qwen3(49152, 2048, 8192, 24, (32, 32, 64), 8192), _qwen3(49152, 576, 1536, 30, (9, 3, 64), 8192)
    ),
    "qwen3-4b": lambda: Shape(
        _qwen3(151936, 2560, 9728, 36, (32, 8, 128), 40960), _qwen3(151936, 1024, 3072, 14, (16, 8, 128), 40960)
    ),
    "tiny": lambda: Shape(_qwen3(512, 96, 192, 2, (4, 2, 32), 2048), _qwen3(512, 64, 128, 1, (4, 2, 32), 2048)),
}


class Pair:
    """`target` and `draft` on one device. `successor` int64 [vocabulary]: the target's token after each token."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        vocabulary = shape.target.vocab_size
        self.successor = torch.randperm(vocabulary, generator=self._generator, device=device)
        self._followers: list[int] = self.successor.tolist()
        self._draw = torch.rand(vocabulary, generator=self._generator, device=device)
        self.target = self._model(shape.target, device, dtype)
        self.draft = self._model(shape.draft, device, dtype)
        for model in (self.target, self.draft):
            embedding = model.get_input_embeddings().weight.detach()
            head = model.get_output_embeddings().weight.detach()
            head[self.successor] = embedding * (_LARGEST_LOGIT / embedding.shape[1])
        # Engines replace layers of the models, but leave their embeddings where they are.
        self._draft_embedding = self.draft.get_input_embeddings().weight.detach()
        self._whole_embedding = self._draft_embedding.clone()

    def set_agreement(self, agreement: float) -> None:
        """In place, so that the engine of the draft, and graphs of its passes, go on with the new embeddings. 1.0 at
        first."""
        self._draft_embedding.copy_(self._whole_embedding)
        apart = (self._draw >= agreement).nonzero()[:, 0]
        self._draft_embedding[apart] = self._whole_embedding[apart.roll(1)]

    def expected(self, token: int, count: int) -> list[int]:
        """What the target writes after a token."""
        written = []
        for _ in range(count):
            token = self._followers[token]
            written.append(token)
        return written

    def _model(self, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        config.dtype = dtype
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                    continue
                deviation = 1.0 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    deviation *= _LOUDNESS
                parameter.normal_(0, deviation, generator=self._generator)
        return model.eval()
