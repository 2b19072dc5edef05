"""The target talks to itself: it writes user turns out of its chat template, partly begun for it, and answers them.

All rows have the same length at every step, so nothing is padded; token ids, their kinds and the states that training
needs come out of the pass that writes them.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.distill.chat_frame import ChatFrame, read_chat_frame
from bench.distill.decoder import BatchDecoder
from bench.distill.dialogue import DialogueRow, DialogueStyle
from bench.distill.openers import OPENERS
from bench.distill.shards import Rows, Shard, open_shards, shard_path, store_shard
from bench.distill.stages import Budget, Progress, derived_seed

# One to hold out and one to learn from.
_FEWEST_SHARDS = 2


@dataclass(frozen=True, slots=True)
class WritingSettings:
    """What shards hold. Shard i has rows of `lengths[i % len(lengths)]` tokens, `tokens` of them together.

    `sampled_from` is the number of likeliest tokens that sampling chooses from. Raises `ValueError` naming field,
    value and limit.
    """

    seed: int = 0
    feature_layer: int = 6
    tokens: int = 128 * 512
    lengths: tuple[int, ...] = (512, 512, 512, 1024)
    sampled_from: int = 50
    style: DialogueStyle = field(default_factory=DialogueStyle)

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 8:
            raise ValueError(f"lengths is {self.lengths}, must be at least one number, each at least 8")
        if self.tokens < max(self.lengths):
            raise ValueError(f"tokens is {self.tokens}, must be at least the longest row, {max(self.lengths)}")
        if self.sampled_from < 1:
            raise ValueError(f"sampled_from is {self.sampled_from}, must be at least 1")


class Writer:
    """Writes shards of one target. The same shard comes out again on the same machine with the same threads."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, settings: WritingSettings) -> None:
        self._model = model
        self._settings = settings
        self._frame = _chat_frame(model, tokenizer)
        self._openers = [
            [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts] for texts in OPENERS.values()
        ]

    def write(self, folder: Path, budget: Budget, progress: Progress) -> list[Shard]:
        """Adds shards to `folder` until the budget is spent, that of the shards already there included.

        At least two shards are written, for one is held out.
        """
        folder.mkdir(parents=True, exist_ok=True)
        there = open_shards(folder)
        made, seconds = len(there), sum(shard.seconds for shard in there)
        numbers = (number for number in itertools.count() if not shard_path(folder, number).is_file())
        while made < _FEWEST_SHARDS or budget.spent(seconds, made) < 1:
            number, started = next(numbers), time.monotonic()
            shown = functools.partial(self._show, budget, progress, number, made, seconds - started)
            rows = self.shard(number, shown)
            elapsed = time.monotonic() - started
            store_shard(shard_path(folder, number), rows, elapsed)
            made, seconds = made + 1, seconds + elapsed
            progress(budget.spent(seconds, made), f"{rows.token_ids.numel() / elapsed:.0f} tokens/s")
        return open_shards(folder)

    def _show(self, budget: Budget, progress: Progress, number: int, made: int, offset: float, share: float) -> None:
        count, length = self._shape(number)
        note = f"shard {number}: {share:.0%} of {count} rows of {length} tokens"
        progress(budget.spent(time.monotonic() + offset, made), note)

    @torch.inference_mode()
    def shard(self, number: int, report: Callable[[float], None] = lambda share: None) -> Rows:
        """Depends on the settings and `number` alone, not on shards before it."""
        count, length = self._shape(number)
        generator = torch.Generator(self._model.device).manual_seed(derived_seed(self._settings.seed, "noise", number))
        choices = random.Random(derived_seed(self._settings.seed, "dialogue", number))
        dialogues = [
            DialogueRow(self._frame, self._openers, self._settings.style, length, choices) for _ in range(count)
        ]
        decoder = BatchDecoder(self._model, self._settings.feature_layer, count, length)
        rows = self._empty(count, length)
        chosen: Sequence[int] = [-1] * count
        for position in range(length):
            placed = [dialogue.next(token) for dialogue, token in zip(dialogues, chosen, strict=True)]
            rows.token_ids[:, position] = torch.tensor([token for token, _ in placed])
            rows.kinds[:, position] = torch.tensor([int(kind) for _, kind in placed])
            decoded = decoder.step(rows.token_ids[:, position].to(self._model.device), position)
            rows.features[:, position] = decoded.features
            rows.final[:, position] = decoded.final
            temperatures = torch.tensor([dialogue.temperature for dialogue in dialogues], device=self._model.device)
            chosen = self._choose(decoded.logits, temperatures, generator).tolist()
            report((position + 1) / length)
        return rows

    def _choose(self, logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
        """[B] tokens from [B, V] logits: Gumbel noise where the temperature [B] is above 0, the largest where not."""
        logits = logits.float()
        logits[:, list(self._frame.forbidden)] = float("-inf")
        top, candidates = logits.topk(min(self._settings.sampled_from, logits.shape[1]))
        uniform = torch.rand(top.shape, generator=generator, device=top.device).clamp_min(1e-20)
        noisy = top - torch.log(-torch.log(uniform)) * temperatures[:, None]
        sampled = candidates.gather(1, noisy.argmax(dim=1, keepdim=True))[:, 0]
        # Not the first of the candidates: of equal logits, the engine takes that of the lowest id.
        return torch.where(temperatures > 0, sampled, logits.argmax(dim=1))

    def _shape(self, number: int) -> tuple[int, int]:
        length = self._settings.lengths[number % len(self._settings.lengths)]
        return self._settings.tokens // length, length

    def _empty(self, count: int, length: int) -> Rows:
        # States stay on the device until the shard is stored: a copy per step would be waited for.
        like = self._model.get_input_embeddings().weight
        features, final = (like.new_empty(count, length, like.shape[1]) for _ in range(2))
        return Rows(
            torch.empty(count, length, dtype=torch.int32), torch.empty(count, length, dtype=torch.int8), features, final
        )


def _chat_frame(model: PreTrainedModel, tokenizer: Any) -> ChatFrame:
    stops = model.generation_config.eos_token_id
    if stops is None:
        raise ValueError("the target's generation settings name no eos_token_id, must name what ends a turn")
    return read_chat_frame(tokenizer, [stops] if isinstance(stops, int) else list(stops))
