"""Where a target parts from the one that made a receipt, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spool.scheduler.messages import TokenLogprobs
from spool.services.receipts.receipt import Receipt


@dataclass(frozen=True, slots=True)
class OtherToken:
    """At a `place` of the output, the receipt's `token` with its log probability `there` and `here`, and the `other`
    one that comes here. None: the answer had no log probabilities, or the token is too unlikely here."""

    place: int
    token: int
    there: float | None
    here: float | None
    other: int
    other_here: float

    def __str__(self) -> str:
        there, here = ("unknown" if one is None else f"{one:.6f}" for one in (self.there, self.here))
        return (
            f"output token {self.place} is {self.token}, of log probability {there} there and {here} here, and here "
            f"{self.other}, of {self.other_here:.6f}"
        )


@dataclass(frozen=True, slots=True)
class Parting:
    """Of rows of logits, each after prompt and output of the receipt, how many have other bits, and of how many another
    token is sampled. `largest_difference`: of the log probability of one of the receipt's tokens; None if unknown."""

    logits: int
    tokens: int
    first: OtherToken | None
    largest_difference: float | None

    def __str__(self) -> str:
        difference = "" if self.largest_difference is None else f" (log probabilities by {self.largest_difference:.3g})"
        first = "" if self.first is None else f"; {self.first}"
        return f"logits of {self.logits} tokens{difference} and {self.tokens} tokens differ{first}"


def parting(
    receipt: Receipt,
    tokens: Sequence[int],
    digests: Sequence[int],
    found: Sequence[TokenLogprobs],
    logprobs: Sequence[float | None],
) -> Parting:
    """`tokens`, `digests` and `found`: what comes here at each place; `logprobs`: those of the answer, perhaps of its
    prompt too, or none."""
    output = receipt.output
    logprobs = logprobs[-len(output) :] if len(logprobs) >= len(output) else ()
    here = [logprob_of(*each) for each in zip(output, found, strict=True)]
    others = [place for place, token in enumerate(tokens) if token != output[place]]
    first = None
    if others:
        place = others[0]
        there = logprobs[place] if logprobs else None
        first = OtherToken(place, output[place], there, here[place], tokens[place], found[place].logprob)
    pairs = zip(logprobs, here, strict=False)
    known = [abs(one - other) for one, other in pairs if one is not None and other is not None]
    unlike = sum(one != other for one, other in zip(digests, receipt.logits_digests, strict=True))
    return Parting(unlike, len(others), first, max(known, default=None))


def logprob_of(token: int, entry: TokenLogprobs) -> float | None:
    """None where the entry does not have the token."""
    return entry.logprob if token == entry.token_id else dict(entry.top).get(token)
