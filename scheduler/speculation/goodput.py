"""What is learnt of workers, and the draft length with the highest goodput for the sequences that a target and a draft
worker share.

After TurboSpec (arXiv 2406.14066, section 4). In a *cycle* each sequence of the target has one round.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from scheduler.speculation.acceptance import PRIOR_CHANCE, ModelAcceptance
from scheduler.speculation.cost_model import FORGET, TOKEN_SHARE, LinearCost, MeanSeconds


@dataclass(slots=True)
class Choice:
    """What one target's sequences draft with one draft worker: `length` tokens each.

    `rate` is the expected tokens per second, `gain` times that of plain decoding. `prepares`: the draft prepares
    proposals while the target verifies.
    """

    length: int
    rate: float
    gain: float
    prepares: bool = False


class TargetFigures:
    """What was learnt of one target, and decided for it.

    `cost` is that of a step by (1, batched tokens, those of them to verify, tokens of KV that are read), `wire` the
    delay of an answer beyond its step, and `step` the time of a step that verifies, by which `wait_bound` counts. The
    last one read `kv_share` tokens of KV for each token to verify. `choices` are by draft worker, and `drafting` tells
    whether any of them is to draft. In a `plain_step`, no sequence drafts; `probe_due` lets one that decodes plainly
    draft one token.

    A target that drafts itself also has its draft's `acceptance`, and costs by its passes and by the tokens that it
    proposes; it is its own draft worker in `choices`.
    """

    def __init__(self, initial_step_seconds: float, acceptance: ModelAcceptance | None = None) -> None:
        self.acceptance = acceptance
        of_own = () if acceptance is None else (TOKEN_SHARE, TOKEN_SHARE**2)
        self.cost = LinearCost((1.0, TOKEN_SHARE, TOKEN_SHARE**2, TOKEN_SHARE**3, *of_own))
        self.wire = MeanSeconds()
        self.step = MeanSeconds(initial_step_seconds)
        self.kv_share = 0.0
        self.choices: dict[str, Choice] = {}
        self.drafting = False
        self.rounds = self.decided_for = self.steps = 0
        self.plain_step = self.probe_due = False


class DraftFigures:
    """What was learnt of one draft worker: the `cost` of a step by (passes, tokens fed or proposed, tokens of KV that
    are read), the delay of an answer beyond its step (`wire`), the acceptance of its model, and in which share of
    verifications the outcome was `found` among those that it had prepared for."""

    def __init__(self, acceptance: ModelAcceptance) -> None:
        self.cost = LinearCost((1.0, TOKEN_SHARE, TOKEN_SHARE**3))
        self.wire = MeanSeconds()
        self.acceptance = acceptance
        self.found = PRIOR_CHANCE


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
    `shared`: both compute on one device, or are one worker.
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
    shared: bool = False

    @property
    def serial(self) -> bool:
        """Whether draft and target wait for each other, since all sequences fit one step."""
        return self.parts == 1

    def seconds(self, passes: int = 0, drafted: float = 0.0) -> float:
        """Of a cycle in which the draft takes so many passes, and drafts so many tokens of a sequence on average."""
        verify = self.parts * self.base + self.count * (self.row * (1 + drafted) + self.kv)
        tokens = self.of_token * drafted * self.load
        # A plain step is sent before the answer to the one before it has come.
        wires = self.wire + self.draft_wire if passes else 0.0
        if self.serial or self.shared:
            return verify + self.parts * passes * self.of_pass + tokens + wires
        # The draft works while the target does: the slower of both decides, or the round trip of one step's sequences.
        one_step = (verify + tokens) / self.parts + passes * self.of_pass + wires
        return max(verify, 2 * passes * self.of_pass + tokens, one_step)


def choose(
    cycle: Cycle, chances: list[float], share: float, before: Choice | None, preparation: Preparation | None
) -> Choice:
    """As if all sequences of the target were alike, of which only a `share` can draft.

    `chances` are the draft model's, by position, `before` is the last choice. A cycle needs no draft step if all
    sequences find their outcomes prepared.
    """
    plain = cycle.count / cycle.seconds()
    choice = Choice(0, plain, 1.0)
    # To begin, drafting must promise more than one observation can change an estimate by.
    best = plain if before and before.length else plain / FORGET
    expected = [share * sum for sum in accumulate(accumulate(chances, mul))] if share else []
    for length, accepted in enumerate(expected, 1):
        rate = cycle.count * (1 + accepted) / cycle.seconds(length, share * length)
        if rate > best:
            best, choice.length, choice.prepares = rate, length, False
        if preparation is None:
            continue
        found, prepared = preparation.found, expected[min(preparation.length, len(expected)) - 1]
        all_found, drafted = found**cycle.count, share * length
        seconds = (1 - all_found) * cycle.seconds(length, drafted) + all_found * cycle.seconds(0, drafted)
        rate = cycle.count * (1 + found * prepared + (1 - found) * accepted) / seconds
        if rate > best:
            best, choice.length, choice.prepares = rate, length, True
    if choice.length:
        choice.rate, choice.gain = best, best / plain
    return choice
