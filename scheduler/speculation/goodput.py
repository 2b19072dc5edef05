"""The draft length with the highest goodput, for the sequences that a target and a draft worker share.

After TurboSpec (arXiv 2406.14066, section 4). In a *cycle* each sequence of the target has one round.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.speculation.acceptance import OwnAcceptance
from scheduler.speculation.cost_model import FORGET


@dataclass(slots=True)
class Choice:
    """What one target's sequences draft with one draft worker: up to `length` tokens each.

    A token is worth drafting if its chance to be accepted is at least `price`, and worth verifying if its chance is at
    least `verify_price`. `rate` is the expected tokens per second, `gain` times that of plain decoding. `chances` are
    the draft model's, by position. `prepares`: the draft prepares proposals while the target verifies.
    """

    length: int
    rate: float
    gain: float
    price: float
    verify_price: float
    chances: list[float]
    prepares: bool = False


@dataclass(frozen=True, slots=True)
class Preparation:
    """What a draft can prepare during a verification: for up to `outcomes` outcomes of each sequence a proposal of
    `length` tokens. The outcome that came was among them in the share `found` of verifications."""

    outcomes: int
    length: int
    found: float


@dataclass(frozen=True, slots=True)
class Cycle:
    """Seconds of a target and a draft worker, by which a cycle is predicted.

    The target verifies its `count` sequences in `parts` steps, each of which takes `base`; a sequence takes `kv` and a
    token to verify `row`. The draft takes `of_pass` for each pass, and `of_token` for each token that it proposes, for
    each of `load` sequences, which may be those of several targets. `wire` and `draft_wire` are the delays of answers.
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
    draft_wire: float

    @property
    def serial(self) -> bool:
        """Whether draft and target wait for each other, since all sequences fit one step."""
        return self.parts == 1

    def seconds(self, passes: int = 0, drafted: float = 0.0) -> float:
        """Of a cycle in which the draft takes so many passes, and drafts so many tokens of a sequence on average."""
        verify = self.parts * self.base + self.count * (self.row * (1 + drafted) + self.kv)
        propose = passes * self.of_pass + self.of_token * drafted * self.load
        # A plain step is sent before the answer to the one before it has come.
        wires = self.wire + self.draft_wire if passes else 0.0
        if self.serial:
            return verify + propose + wires
        # The draft works while the target does: the slower of both decides, or the round trip of one step's sequences.
        one_step = (verify + self.of_token * drafted * self.load) / self.parts + passes * self.of_pass + wires
        return max(verify, propose + passes * self.of_pass, one_step)


def choose(
    cycle: Cycle,
    chances: list[float],
    members: list[OwnAcceptance | None],
    before: Choice | None,
    preparation: Preparation | None,
) -> Choice:
    """As if all sequences of the target were like the `members`: None for a sequence that cannot draft.

    `chances` are the draft model's, `before` is the last choice. A cycle needs no draft step if all sequences find
    their outcomes prepared.
    """
    plain = cycle.count / cycle.seconds()
    # A second is worth as many tokens as were committed in a second by the last choice.
    value = plain * (before.gain if before else 1.0)
    verify_price = value * cycle.row
    price = verify_price + value * cycle.of_token if cycle.serial else verify_price
    choice = Choice(0, plain, 1.0, price, verify_price, chances)
    worth = [own.survival(chances, price) if own is not None else [] for own in members]
    # To begin, drafting must promise more than one observation can change an estimate by.
    best = plain if before and before.length else plain / FORGET
    accepted = drafted = 0.0
    for length in range(1, len(chances) + 1):
        reached = [survival[length - 1] for survival in worth if len(survival) >= length]
        accepted += sum(reached) / len(members)
        drafted += len(reached) / len(members)
        rate = cycle.count * (1 + accepted) / cycle.seconds(length, drafted)
        if reached and rate > best:
            best, choice.length, choice.prepares = rate, length, False
        if preparation is None or not reached:
            continue
        found = preparation.found
        prepared = sum(sum(survival[: preparation.length]) for survival in worth) / len(members)
        all_found = found**cycle.count
        seconds = (1 - all_found) * cycle.seconds(length, drafted) + all_found * cycle.seconds(0, drafted)
        rate = cycle.count * (1 + found * prepared + (1 - found) * accepted) / seconds
        if rate > best:
            best, choice.length, choice.prepares = rate, length, True
    if choice.length:
        choice.rate, choice.gain = best, best / plain
    return choice
