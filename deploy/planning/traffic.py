"""Requests and when they arrive: drawn at random by a description, or read from a trace."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """`arrival` is in seconds since the traffic began. Prompts whose `blocks` begin alike share that many blocks of
    `block_tokens` tokens; a prompt without blocks shares nothing."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0

    def prompt(self, number: int) -> tuple[int, ...]:
        """Tokens of the prompt: equal to those of another request where their blocks are, and unlike otherwise.

        `number` is that of the request, which no other one has.
        """
        shared = [1 + 2 * block for block in self.blocks for _ in range(self.block_tokens)]
        shared = shared[: self.prompt_tokens]
        return (*shared, *(2 + 2 * number,) * (self.prompt_tokens - len(shared)))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal numbers of tokens with this mean and coefficient of variation, from 1 to `most`."""

    mean: float
    variation: float
    most: int

    def draw(self, rng: random.Random) -> int:
        deviation = math.sqrt(math.log1p(self.variation**2))
        tokens = rng.lognormvariate(math.log(self.mean) - deviation**2 / 2, deviation)
        return min(max(1, round(tokens)), self.most)


@dataclass(frozen=True, slots=True)
class SharedBeginning:
    """A `share` of the prompts begin with one of `count` system prompts of `tokens` tokens each, all equally often."""

    share: float
    count: int
    tokens: int


def drawn(
    rate: float, number: int, prompt: Lengths, output: Lengths, shared: SharedBeginning | None = None, seed: int = 0
) -> list[PlannedRequest]:
    """So many requests that arrive as a Poisson process, `rate` a second on average; the same for the same seed.

    A shared beginning comes before the prompt's own tokens.
    """
    rng = random.Random(seed)
    requests, now = [], 0.0
    for _ in range(number):
        now += rng.expovariate(rate)
        tokens, wanted = prompt.draw(rng), output.draw(rng)
        if shared is not None and rng.random() < shared.share:
            blocks = (rng.randrange(shared.count),)
            requests.append(PlannedRequest(now, tokens + shared.tokens, wanted, blocks, shared.tokens))
        else:
            requests.append(PlannedRequest(now, tokens, wanted))
    return requests


def faster(requests: Sequence[PlannedRequest], factor: float) -> list[PlannedRequest]:
    """The same requests, so many times as often."""
    return [replace(request, arrival=request.arrival / factor) for request in requests]
