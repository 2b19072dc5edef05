"""Sequences of many cells as a fluid: how many wait, prefill and decode, and what they have still to compute.

Output lengths are taken to be exponential, as ServeGen (arXiv 2505.09999) found them: then what a sequence has still to
decode does not depend on what it has decoded. All arrays have an entry for each cell.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.fleet.speeds import MAX_RUNNING, Floats, Speeds

_ITERATIONS = 3
"""To find how many decode on average over a step, on which their speed depends."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of a prompt and of an answer."""

    prompt: float
    output: float


@dataclass(frozen=True, slots=True)
class Flow:
    """What came of one step: tokens `prefilled` and `committed`, sequences `finished`, and seconds that a request which
    arrives now waits for its first token, in the cell's queue and for its prompt."""

    prefilled: Floats
    committed: Floats
    finished: Floats
    first_token: Floats


@dataclass(slots=True)
class Group:
    """Sequences on their way to another cell, and the tokens to prefill for them. Of these were `lost`, for they had
    been computed before."""

    sequences: float = 0.0
    tokens: float = 0.0
    lost: float = 0.0


class Cells:
    """All cells of a fleet. Nobody leaves but those that have finished, or that `release` hands back."""

    def __init__(self, count: int, speeds: Speeds, lengths: Lengths) -> None:
        self._speeds = speeds
        self._lengths = lengths
        self.waiting = np.zeros(count)
        self.waiting_tokens = np.zeros(count)
        self.prefilling = np.zeros(count)
        self.backlog = np.zeros(count)
        """Tokens that those which prefill have still to prefill."""
        self.decoding = np.zeros(count)
        self.context = np.zeros(count)
        """Tokens of those which decode: their KV."""
        self._finishing = np.zeros(count)
        """A second, lately."""

    @property
    def running(self) -> Floats:
        return self.prefilling + self.decoding

    @property
    def sequences(self) -> Floats:
        return self.waiting + self.prefilling + self.decoding

    def arrive(self, sequences: Floats, tokens: Floats) -> None:
        """Sequences that have so many tokens to prefill, prompts and what was committed elsewhere."""
        self.waiting += sequences
        self.waiting_tokens += tokens

    def release(self, cells: Floats) -> Group:
        """Of each cell that share of its sequences leaves, whatever they were doing; their KV is lost."""
        group = Group(
            float((self.sequences * cells).sum()),
            float(((self.waiting_tokens + self.backlog + self.context) * cells).sum()),
            float((self.context * cells).sum()),
        )
        for held in (
            self.waiting,
            self.waiting_tokens,
            self.prefilling,
            self.backlog,
            self.decoding,
            self.context,
        ):
            held *= 1.0 - cells
        return group

    def lose_kv(self, shares: Floats) -> Floats:
        """Of each cell that share of the running sequences returns to its queue: their target is gone. Answers the
        tokens of KV that were lost and must be computed anew."""
        lost = self.context * shares
        self.waiting += self.running * shares
        self.waiting_tokens += self.backlog * shares + lost
        for held in (self.prefilling, self.backlog, self.decoding, self.context):
            held *= 1.0 - shares
        return lost

    def advance(self, targets: Floats, seconds: float) -> Flow:
        """So much time with so many targets; cells without one, or without a scheduler, stand still with 0."""
        on_each = 1.0 / np.maximum(targets, 1e-9)
        sequences, tokens = self._admit(targets)
        able = self._speeds.prefill(np.where(targets > 0, self.decoding * on_each, 0.0)) * targets
        # However many targets there are, a prompt's chunks are computed one after the other on one of them.
        alone = able * on_each / self._lengths.prompt
        left, _ = relaxed(self.backlog, tokens, alone, seconds)
        prefilled = np.minimum(self.backlog + tokens - left, able * seconds)
        through = self._finish_prefill(sequences, tokens, prefilled)
        slowed = self._speeds.slowed(prefilled * on_each / seconds) * targets
        finished = self._finish(through, prefilled, slowed, on_each, seconds)
        self._finishing += (finished / seconds - self._finishing) * min(1.0, seconds / 10.0)
        first_token = self.waiting / np.maximum(self._finishing, 1e-9)
        first_token = np.where(self.waiting > 1e-6, first_token, 0.0)
        own = self.backlog + self._lengths.prompt * np.maximum(targets, 1.0)
        first_token = first_token + own / np.maximum(able, 1e-9)
        return Flow(prefilled, finished * self._lengths.output, finished, np.where(targets > 0, first_token, np.inf))

    def _admit(self, targets: Floats) -> tuple[Floats, Floats]:
        """Sequences and their tokens that leave the queue."""
        free = np.maximum(MAX_RUNNING * targets - self.running, 0.0)
        share = np.minimum(1.0, free / np.maximum(self.waiting, 1e-9))
        admitted, tokens = self.waiting * share, self.waiting_tokens * share
        self.waiting -= admitted
        self.waiting_tokens -= tokens
        return admitted, tokens

    def _finish_prefill(self, admitted: Floats, tokens: Floats, prefilled: Floats) -> Floats:
        """The sequences whose prompts these tokens complete."""
        self.prefilling += admitted
        self.backlog += tokens
        share = np.where(self.backlog > 0, prefilled / np.maximum(self.backlog, 1e-9), 1.0)
        through = self.prefilling * np.minimum(share, 1.0)
        self.prefilling -= through
        self.backlog -= prefilled
        return through

    def _finish(self, through: Floats, tokens: Floats, slowed: Floats, on_each: Floats, seconds: float) -> Floats:
        """Those that end, while others come with so many tokens of KV, and the tokens that they all get."""
        mean = np.maximum(self.decoding, through)
        for _ in range(_ITERATIONS):
            at = np.where(slowed > 0, mean * on_each, 0.0)
            ending = self._speeds.of("tokens", at) * slowed / np.maximum(mean * self._lengths.output, 1e-9)
            left, mean = relaxed(self.decoding, through, ending, seconds)
        there = self.decoding + through
        finished = there - left
        share = np.where(there > 0, left / np.maximum(there, 1e-9), 1.0)
        self.context = (self.context + tokens + finished * self._lengths.output) * share
        self.decoding = left
        return finished


def relaxed(held: Floats, coming: Floats, rate: Floats, seconds: float) -> tuple[Floats, Floats]:
    """What is left of something that ends at this rate a second, while more comes evenly; and how much of it there was
    on average."""
    decay = rate * seconds
    steady = coming / np.maximum(decay, 1e-9)
    left = steady + (held - steady) * np.exp(-decay)
    # Hardly any ends: then what comes adds up.
    left = np.where(decay > 1e-6, left, held + coming)
    mean = np.where(decay > 1e-6, (held + coming - left) / np.maximum(decay, 1e-9), held + coming / 2)
    return left, mean
