"""Training a head on texts, and how often it is right on others."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from bench.make_head.head import TrainedHead
from bench.make_head.texts import Text

PASSES = 4
"""Tokens of the longest proposal that the head learns to make."""
_WARM_UP = 40
_LAST_RATE = 0.03
_ROWS_OF_LOGITS = 512
_PASS_WEIGHT = 0.8
"""Of each pass's loss, as a multiple of the one's before."""

_Any = TypeVar("_Any", Text, "Seen")


@dataclass(frozen=True, slots=True)
class Settings:
    """A step learns from about `batch_tokens` tokens; each text is learnt from `epochs` times."""

    batch_tokens: int = 1024
    learning_rate: float = 3e-3
    epochs: int = 2


@dataclass(frozen=True, slots=True)
class Seen:
    """A text as the target saw it: its tokens, the features `[tokens, layers * hidden]`, and the final hidden states
    `[tokens, hidden]`."""

    tokens: Tensor
    features: Tensor
    final: Tensor
    start: int


class Trainer:
    """`vocabulary`: ids of the tokens that the head may propose, ascending."""

    def __init__(self, target: PreTrainedModel, head: TrainedHead, vocabulary: Sequence[int]) -> None:
        self.head = head
        self._target = target
        self._vocabulary = torch.tensor(vocabulary, device=target.device)
        self._rows = target.get_output_embeddings().weight.detach()[self._vocabulary]
        self._embedding = target.get_input_embeddings()

    @torch.no_grad()
    def see(self, texts: Sequence[Text], batch_tokens: int, title: str) -> list[Seen]:
        """Of texts that are long enough to learn from."""
        seen: list[Seen] = []
        batches = [*_batches([text for text in texts if len(text.tokens) > 2 * PASSES], batch_tokens)]
        for batch in track(batches, title):
            longest = _padded(max(len(text.tokens) for text in batch))
            # Behind a text's end there is anything: no token sees what follows it.
            ids = torch.tensor([[*text.tokens, *[0] * (longest - len(text.tokens))] for text in batch])
            found = self._target.get_decoder()(
                input_ids=ids.to(self._target.device), output_hidden_states=True, use_cache=False
            )
            features = torch.cat([found.hidden_states[layer] for layer in self.head.feature_layers], -1)
            for row, text in enumerate(batch):
                length = len(text.tokens)
                states = features[row, :length].clone(), found.last_hidden_state[row, :length].clone()
                seen.append(Seen(ids[row, :length].clone(), *states, text.start))
        return seen

    def train(self, seen: Sequence[Seen], settings: Settings, drawn: random.Random, title: str) -> float:
        """Gives the loss over the last tenth of all steps."""
        optimiser = torch.optim.AdamW(self.head.parameters(), settings.learning_rate, betas=(0.9, 0.95))
        batches: list[Sequence[Seen]] = []
        for _ in range(settings.epochs):
            epoch = [*_batches(seen, settings.batch_tokens)]
            drawn.shuffle(epoch)
            batches += epoch
        losses: list[float] = []
        for step, batch in enumerate(track(batches, title)):
            for group in optimiser.param_groups:
                group["lr"] = settings.learning_rate * _share_of_rate(step, len(batches))
            with self._in_16_bits():
                loss = self._loss(batch)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            optimiser.step()
            losses.append(loss.item())
        last = losses[-max(1, len(losses) // 10) :]
        return sum(last) / len(last)

    @torch.no_grad()
    def right(self, seen: Sequence[Seen], batch_tokens: int) -> list[float]:
        """By position in a proposal, how often its token is the target's where all before it are: on answers that are
        greedy, the share that greedy decoding accepts."""
        right, asked = [0] * PASSES, [0] * PASSES
        for batch in _batches(seen, batch_tokens):
            with self._in_16_bits():
                passes, final = self._passes(batch)
            rows = passes[0].shape[1]
            wanted = F.linear(final, self._target.get_output_embeddings().weight).argmax(-1)
            chained = _rows_of([(one.start - 2, len(one.tokens) - PASSES) for one in batch], rows)
            for number, hidden in enumerate(passes):
                proposed = F.linear(hidden.to(self._rows.dtype), self._rows).argmax(-1)
                asked[number] += int(chained.sum())
                chained = chained & (self._vocabulary[proposed] == wanted[:, 1 + number : 1 + number + rows])
                right[number] += int(chained.sum())
        return [found / max(1, count) for found, count in zip(right, asked, strict=True)]

    def _loss(self, batch: Sequence[Seen]) -> Tensor:
        """Of all passes, after the same tokens: cross entropy to the target's distribution over the vocabulary, and the
        distance to its final hidden states, relative to their size. The target's own head reads both, so that the
        second says more of each token, which counts where there are few."""
        passes, final = self._passes(batch)
        places = final.shape[1] - 2 * PASSES + 1
        counts = _rows_of([(0, len(one.tokens) - 2 * PASSES + 1) for one in batch], places)
        # Row t of pass p is about what follows the token t + p + 1.
        rows = torch.stack(
            [hidden[:, PASSES - 1 - number :][:, :places][counts] for number, hidden in enumerate(passes)]
        )
        aims = final[:, PASSES:][:, :places][counts]
        distances = (rows.float() - aims.float()).pow(2).mean((1, 2)) / aims.float().pow(2).mean()
        weights = _PASS_WEIGHT ** torch.arange(PASSES)
        loss: Tensor = _CrossEntropy.apply(rows, aims, self._rows) + (weights * distances).sum()
        return loss

    def _passes(self, batch: Sequence[Seen]) -> tuple[list[Tensor], Tensor]:
        """Outputs of the passes `[texts, tokens - PASSES, hidden]`, final hidden states `[texts, tokens, hidden]`."""
        tokens, features, final = (
            torch.nn.utils.rnn.pad_sequence([getattr(one, name) for one in batch], batch_first=True)
            for name in ("tokens", "features", "final")
        )
        more = _padded(tokens.shape[1]) - tokens.shape[1]
        tokens = F.pad(tokens, (0, more))
        features, final = (F.pad(states, (0, 0, 0, more)) for states in (features, final))
        rows = tokens.shape[1] - PASSES
        return self.head(features[:, :rows], self._embedding(tokens[:, 1:]), PASSES), final

    def _in_16_bits(self) -> Any:
        return torch.autocast(self._target.device.type, torch.bfloat16)


class _CrossEntropy(torch.autograd.Function):
    """The mean over rows of the weighted cross entropies of all passes. The gradient is computed with it, some rows at
    a time: logits of all rows would take gigabytes."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, wanted: Tensor, head: Tensor) -> Tensor:
        """Hidden `[passes, rows, hidden]`, the target's final states `[rows, hidden]`, the head `[tokens, hidden]`."""
        gradient, total, rows = torch.empty_like(hidden), 0.0, len(wanted)
        for start in range(0, rows, _ROWS_OF_LOGITS):
            part = slice(start, start + _ROWS_OF_LOGITS)
            aim = F.linear(wanted[part], head).float().softmax(-1)
            for number in range(len(hidden)):
                weight = _PASS_WEIGHT**number / rows
                logs = F.linear(hidden[number, part].to(head.dtype), head).float().log_softmax(-1)
                total -= weight * float(torch.dot(aim.flatten(), logs.flatten()))
                of_logits = logs.exp_().sub_(aim).mul_(weight)
                gradient[number, part] = (of_logits.to(head.dtype) @ head).to(hidden.dtype)
        context.save_for_backward(gradient)
        return hidden.new_tensor(total)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = context.saved_tensors
        return gradient * gradients[0], None, None


def _padded(tokens: int) -> int:
    """Few lengths: torch prepares its products anew for each."""
    return -(-tokens // 32) * 32


def _rows_of(spans: Sequence[tuple[int, int]], rows: int) -> Tensor:
    """Which of so many rows of each text are in its span."""
    places = torch.arange(rows)
    return torch.stack([(places >= start) & (places < end) for start, end in spans])


def _share_of_rate(step: int, steps: int) -> float:
    decayed = _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * step / steps)) / 2
    return min(1.0, (step + 1) / _WARM_UP) * decayed


def _batches(texts: Sequence[_Any], tokens: int) -> Iterator[list[_Any]]:
    """Of texts of similar length, padded to about so many tokens."""
    batch: list[_Any] = []
    for text in sorted(texts, key=lambda text: len(text.tokens)):
        if batch and (len(batch) + 1) * len(text.tokens) > tokens:
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch
