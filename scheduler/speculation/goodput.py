"""The draft length with the most expected tokens a second, for the sequences that a target and a draft worker share.

After TurboSpec (arXiv 2406.14066, section 4). In a *cycle* each sequence of the target has one round.
"""

from __future__ import annotations

from collections.abc import Sequence as Members
from dataclasses import dataclass

from scheduler.speculation.acceptance import OwnAcceptance
from scheduler.speculation.cost_model import FORGET
from scheduler.state.workers import STEADY_KV_LAG, Sequence


@dataclass(slots=True)
class Choice:
    """What one target's sequences draft with one draft worker: so many `sequences` up to `length` tokens each.

    A draft token is worth it from a chance of `price` on, and worth verifying from `row_price` on. One to feed costs
    `feed_price` tokens; a draft that lacks more than `most_fed` catches up on the side. `rate` is the expected tokens a
    second, `gain` times that of plain decoding. `chances` are the draft model's, by place.
    """

    length: int
    sequences: float
    rate: float
    gain: float
    price: float
    row_price: float
    feed_price: float
    most_fed: float
    chances: list[float]
    ahead: tuple[int, int] = (0, 0)
    """Outcomes to prepare for during a verification, and tokens of each."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """Seconds of a target and a draft worker, by which a cycle is predicted.

    The target verifies its `count` sequences in so many `parts`, each of which takes `base`; a sequence takes `kv` and
    a token to verify `row`. The draft takes `of_pass` for each pass, and for each of `load` sequences, which may be
    those of several targets, `of_token` for each token that it proposes and `of_feed` for each that it has to be fed
    first: prompts, and rounds without a draft. `wire` and `draft_wire` are what their answers take to come.
    """

    count: int
    load: int
    parts: float
    base: float
    row: float
    kv: float
    wire: float
    of_pass: float
    of_token: float
    of_feed: float
    draft_wire: float

    @property
    def serial(self) -> bool:
        """The draft and the target work in turns: all sequences fit one step."""
        return self.parts == 1

    def seconds(self, passes: int = 0, drafted: float = 0.0, fed: float = 0.0) -> float:
        """With so many tokens drafted and fed for each sequence on average: the sum of both workers' work where they
        take turns, else the longer of them."""
        verify = self.parts * self.base + self.count * (self.row * (1 + drafted) + self.kv)
        propose, feed = self.of_token * drafted * self.load, self.of_feed * fed * self.load
        wires = self.wire + self.draft_wire if passes else self.wire
        if self.serial:
            return verify + passes * self.of_pass + propose + feed + wires
        waiting = wires + verify / self.parts + passes * self.of_pass + propose / self.parts
        return max(waiting, verify, 2 * passes * self.of_pass + propose + feed)


@dataclass(frozen=True, slots=True)
class Ahead:
    """That the draft can prepare for so many `outcomes`, with `length` tokens each, and has found that of `found`."""

    outcomes: int = 0
    length: int = 0
    found: float = 0.0


def choose(
    cycle: Cycle,
    chances: list[float],
    members: Members[tuple[Sequence, OwnAcceptance]],
    before: Choice | None,
    ahead: Ahead,
) -> Choice:
    """As if all sequences of the target were like the `members`; `before` was chosen last.

    What was prepared and found spares a step of the draft where it is found for all, and brings `ahead.length` tokens.
    """
    plain = cycle.count / cycle.seconds()
    # A second is worth as many tokens as were committed in one when this was last decided.
    rate = plain * (before.gain if before else 1.0)
    of_draft, feeding = (rate * cycle.of_token, rate * cycle.of_feed) if cycle.serial else (0.0, 0.0)
    most_fed = cycle.of_pass / cycle.of_feed
    choice = Choice(0, 0.0, plain, 1.0, rate * cycle.row + of_draft, rate * cycle.row, feeding, most_fed, chances)
    worth = [worth_drafting(own, sequence, choice) for sequence, own in members]
    fed = sum(_fed(one, kept, most_fed) for (one, _), kept in zip(members, worth, strict=True) if kept) / len(members)
    # To begin, drafting must promise more than one observation can make of an estimate; as much again drafting ahead.
    best = plain if before and before.length else plain / FORGET
    margin = 1.0 if before and before.ahead[0] else 1 / FORGET
    accepted = drafted = 0.0
    prepared = ahead.found * sum(sum(kept[: ahead.length]) for kept in worth) / len(members)
    for passes in range(1, max(map(len, worth)) + 1):
        reached = [kept[passes - 1] for kept in worth if len(kept) >= passes]
        accepted, drafted = accepted + sum(reached) / len(members), drafted + len(reached) / len(members)
        seconds = cycle.seconds(passes, drafted, fed)
        rate = cycle.count * (1 + accepted) / seconds
        if rate > best:
            best, choice.length, choice.rate, choice.gain, choice.ahead = rate, passes, rate, rate / plain, (0, 0)
        if not ahead.outcomes:
            continue
        seconds -= ahead.found**cycle.count * (seconds - cycle.seconds(0, ahead.found * drafted))
        rate = cycle.count * (1 + prepared + (1 - ahead.found) * accepted) / seconds
        if rate > best * (1.0 if choice.ahead[0] else margin):
            best, choice.length, choice.rate, choice.gain = rate, passes, rate, rate / plain
            choice.ahead = ahead.outcomes, ahead.length
    if choice.length:
        choice.sequences = cycle.count * sum(map(bool, worth)) / len(members)
    return choice


def worth_drafting(own: OwnAcceptance, sequence: Sequence, choice: Choice) -> list[float]:
    """The chances of the tokens that are worth their price, if together they also pay for what has to be fed first."""
    if sequence.request.draft_length is not None or sequence.drafting_refused or sequence.suspected:
        return []
    kept = own.survival(choice.chances, choice.price)
    fed = _fed(sequence, kept, choice.most_fed)
    return kept if not fed or sum(kept) - choice.price * len(kept) >= choice.feed_price * fed else []


def _fed(sequence: Sequence, kept: list[float], most: float) -> float:
    """Tokens that a draft has to be fed, spread over the sequence's rounds or those that anything is remembered for."""
    lag = kv_lag(sequence) - STEADY_KV_LAG
    left = max(1, sequence.end - sequence.length)
    return min(most, lag) * max(1 - FORGET, (1 + sum(kept)) / left) if lag > 0 else 0.0


def kv_lag(sequence: Sequence) -> int:
    """Tokens of KV that a draft lacks before it can propose."""
    return sequence.length if sequence.draft is None else sequence.draft.kv_lag(sequence)
