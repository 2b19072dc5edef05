"""Trains the student to choose what the target chooses, at positions of the target's own text."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from torch import Tensor

from bench.distill.dialogue import TokenKind
from bench.distill.shards import Batches, Rows, Shard
from bench.distill.stages import Budget, Progress, derived_seed
from bench.distill.student import Student

# How likely a position is drawn, by the kind of token that follows it.
_WEIGHTS = {TokenKind.FORCED: 0.0, TokenKind.USER: 0.15, TokenKind.GREEDY: 1.0, TokenKind.SAMPLED: 0.7}
_STEPS_BETWEEN_REPORTS = 10


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """AdamW, linear warm-up, then cosine down to `last_rate` of `learning_rate`.

    A step reads rows of `tokens` tokens and compares `positions` of them over the draft vocabulary and up to
    `other_tokens` further tokens, drawn anew each time. `hidden_weight` is for the distance to the target's final
    hidden states. `checkpoint_seconds` is the time between checkpoints.
    """

    seed: int = 0
    learning_rate: float = 1e-3
    last_rate: float = 0.03
    warm_up_steps: int = 40
    tokens: int = 8192
    positions: int = 2048
    other_tokens: int = 1024
    hidden_weight: float = 0.3
    weight_decay: float = 0.01
    largest_gradient: float = 1.0
    checkpoint_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class Losses:
    """Of one step: cross entropy in nats, smooth L1 distance, and the share of equal first choices."""

    total: Tensor
    cross_entropy: float
    distance: float
    agreement: float


@dataclass(slots=True)
class TrainingState:
    """How far training has come; `seconds` are those of all runs together."""

    step: int = 0
    seconds: float = 0.0


class Trainer:
    """Trains `student` in place. `head` [V, H] is the target's, `token_ids` [v] the draft vocabulary.

    With a checkpoint in `checkpoint`, training goes on from it and ends as if it had never stopped, with the same
    shards and a budget counted in steps to the last bit.
    """

    def __init__(
        self, student: Student, head: Tensor, token_ids: Tensor, settings: TrainingSettings, checkpoint: Path
    ) -> None:
        self.student = student
        self._head = head
        self._proposed = head[token_ids.to(head.device, torch.int64)]
        self._is_proposed = torch.zeros(len(head), dtype=torch.bool)
        self._is_proposed[token_ids.to(torch.int64)] = True
        self._settings = settings
        self._checkpoint = checkpoint
        matrices = [parameter for parameter in student.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in student.parameters() if parameter.dim() < 2]
        self._optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.state = TrainingState()

    def train(self, shards: Sequence[Shard], budget: Budget, progress: Progress) -> None:
        """Trains until the budget is spent, what a checkpoint says was spent before included."""
        self.load()
        batches = Batches(shards, self._settings.tokens, self._settings.seed)
        started, before = time.monotonic(), self.state.seconds
        stored = started
        while (spent := budget.spent(self.state.seconds, self.state.step)) < 1:
            losses = self.step(batches[self.state.step], spent)
            self.state.step += 1
            self.state.seconds = before + time.monotonic() - started
            if losses is not None and self.state.step % _STEPS_BETWEEN_REPORTS == 0:
                progress(spent, _described(self.state, losses))
            if time.monotonic() - stored >= self._settings.checkpoint_seconds:
                self._store()
                stored = time.monotonic()
        self._store()

    def step(self, rows: Rows, spent: float) -> Losses | None:
        """One step with that part of the budget spent; None where no row has a position to learn from."""
        generator = torch.Generator().manual_seed(derived_seed(self._settings.seed, "step", self.state.step))
        positions = self._draw_positions(rows.kinds, generator)
        if not len(positions):
            return None
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate(spent)
        losses = self._losses(rows, positions, self._draw_head(generator))
        self._optimiser.zero_grad()
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), self._settings.largest_gradient)
        self._optimiser.step()
        return losses

    def _rate(self, spent: float) -> float:
        warm = min(1.0, (self.state.step + 1) / max(self._settings.warm_up_steps, 1))
        cosine = 0.5 * (1 + math.cos(math.pi * spent))
        last = self._settings.last_rate
        return self._settings.learning_rate * warm * (last + (1 - last) * cosine)

    def _draw_positions(self, kinds: Tensor, generator: torch.Generator) -> Tensor:
        """Indices into the flattened [B · L] positions."""
        by_kind = torch.tensor([_WEIGHTS[kind] for kind in TokenKind])
        weights = torch.zeros(kinds.shape)
        weights[:, :-1] = by_kind[kinds[:, 1:].long()]
        count = min(self._settings.positions, int((weights > 0).sum()))
        return torch.multinomial(weights.flatten(), count, generator=generator) if count else torch.empty(0).long()

    def _draw_head(self, generator: torch.Generator) -> Tensor:
        """Rows of the head: those of the draft vocabulary, then those of other tokens."""
        others = torch.randint(len(self._head), (self._settings.other_tokens,), generator=generator)
        others = others[~self._is_proposed[others]]
        return torch.cat((self._proposed, self._head[others.to(self._head.device)]))

    def _losses(self, rows: Rows, positions: Tensor, head: Tensor) -> Losses:
        device = self._head.device
        positions = positions.to(device)
        final = rows.final.to(device).flatten(0, 1)[positions]
        with torch.autocast(device.type, torch.bfloat16):
            hidden = self.student(rows.features.to(device).float()).flatten(0, 1)[positions]
            with torch.no_grad():
                target = (final @ head.T).float()
            logits = F.linear(hidden, head).float()
        cross_entropy = -(target.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        distance = F.smooth_l1_loss(hidden.float(), final.float())
        agreement = (target.argmax(-1) == logits.argmax(-1)).float().mean()
        return Losses(
            cross_entropy + self._settings.hidden_weight * distance,
            cross_entropy.item(),
            distance.item(),
            agreement.item(),
        )

    def _store(self) -> None:
        partial = self._checkpoint.with_name(f".{self._checkpoint.name}.partial")
        content: dict[str, Any] = {
            "student": self.student.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "step": self.state.step,
            "seconds": self.state.seconds,
        }
        torch.save(content, partial)
        os.replace(partial, self._checkpoint)

    def load(self) -> None:
        """Takes up the checkpoint, if there is one."""
        if not self._checkpoint.is_file():
            return
        content: Mapping[str, Any] = torch.load(self._checkpoint, map_location=self._head.device, weights_only=True)
        self.student.load_state_dict(content["student"])
        self._optimiser.load_state_dict(content["optimiser"])
        self.state = TrainingState(content["step"], content["seconds"])


def _described(state: TrainingState, losses: Losses) -> str:
    return (
        f"step {state.step}, cross entropy {losses.cross_entropy:.3f}, distance {losses.distance:.3f}, "
        f"agreement {losses.agreement:.3f}"
    )
