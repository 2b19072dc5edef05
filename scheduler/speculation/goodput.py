"""What is learnt of a target with its proposals, and the draft length with the highest goodput for its sequences.

After TurboSpec (arXiv 2406.14066, section 4). In a *cycle* each sequence of the target has one round.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import mul

from spool.scheduler.speculation.acceptance import Acceptance, LookupAcceptance
from spool.scheduler.speculation.cost_model import FORGET, TOKEN_SHARE, LinearCost, MeanSeconds

_WORTH_A_TRIAL = 0.9
"""Of what plain decoding yields: where as much is expected of drafting, that is tried now and then."""


@dataclass(slots=True)
class Choice:
    """What is proposed for each sequence of a target: `length` tokens by a draft, or up to `lookup` where lookup finds
    them.

    `rate` is the expected tokens per second, `gain` times that of plain decoding. A step that waits for its proposals
    for more than `wait` seconds yields less than a plain one would; with length 0, a step with a probe, of which one in
    two is accepted. `other` is the best that drafts, where plain decoding is expected to yield hardly more.
    """

    length: int
    rate: float
    gain: float
    wait: float
    other: Choice | None = None
    lookup: int | None = None
    """None: as many as `length`."""


class TargetFigures:
    """What was learnt of one target and of whoever proposes for it, and decided for it.

    `acceptance` is that of the draft or head that proposes, rounds in which nobody proposed included; None: nobody
    does. `lookup` is that of what lookup finds instead; None: it has found nothing yet. `cost` is that of a step by
    (1, batched tokens, those of them to decode or verify, tokens of KV that are read). What it costs the target to get
    its proposals, waits included, is `drafting_cost`, by (1, tokens of the longest, tokens of all, sequences for which
    nothing was asked the round before: who proposes reads first what has come since it was). `step` is the time of a
    step that decodes, in which waits are counted. `in_time` is the share of proposals that were there when they were
    asked for.

    Where nothing was asked the round before, a proposal tells little of what the next ones cost: `tried` is the most
    tokens of a step without such sequences, and 0 before the first. In a `plain_step`, no sequence drafts. The sequence
    `prober` drafts a token in `probes_left` more rounds, even where the others decode plainly; its next probe is due
    after so many `steps`. All draft on trial up to the step `trial_until`, and again from `next_trial` on. Up to the
    step `reading_until`, a draft worker has to read the texts of those that draft now.
    """

    def __init__(self, initial_step_seconds: float, acceptance: Acceptance | None = None) -> None:
        self.cost = LinearCost((1.0, TOKEN_SHARE, TOKEN_SHARE**2, TOKEN_SHARE**3))
        self.step = MeanSeconds(initial_step_seconds)
        self.rounds = self.decided_for = self.steps = self.reading_until = 0
        self.next_probe = 0.0
        self.plain_step = False
        self.lookup: LookupAcceptance | None = None
        self.change_proposer(acceptance)

    @property
    def length(self) -> int:
        """The length that pays."""
        choice = self.choice
        return 0 if choice is None else choice.length

    def change_proposer(self, acceptance: Acceptance | None) -> None:
        """Another worker proposes. Of another one, only the acceptance of its model is known."""
        self.acceptance = acceptance
        # The first try is of one sequence. That more tokens cost more is learnt where more are tried.
        self.drafting_cost = LinearCost((1.0, 1.0, 0.0, 1.0), (1.0, 1.0, TOKEN_SHARE, 1.0))
        self.in_time = 1.0
        self.choice: Choice | None = None
        self.tried = self.trial_until = self.next_trial = 0
        self.prober: int | None = None
        self.probes_left = 0


@dataclass(frozen=True, slots=True)
class Cycle:
    """Seconds of a target by which a cycle is predicted.

    The target verifies its `count` sequences in `parts` steps, each of which takes `base`; a sequence takes `kv` and a
    token to verify `row`. Proposals take `of_step` of each step, `of_pass` for each token of the longest, and
    `of_token` for each token of all that are asked for.
    """

    count: int
    parts: float
    base: float
    row: float
    kv: float
    of_step: float
    of_pass: float
    of_token: float

    def verification(self, proposed: float = 0.0) -> float:
        """Of a cycle in which so many tokens of a sequence are verified on average, without proposing them."""
        return self.parts * self.base + self.count * (self.row * (1 + proposed) + self.kv)

    def drafting(self, longest: int, share: float) -> float:
        """For proposals of so many tokens, for this share of the sequences."""
        return self.parts * (self.of_step + longest * self.of_pass) + self.count * share * longest * self.of_token


def choose(
    cycle: Cycle,
    chances: list[float],
    share: float,
    in_time: float,
    before: Choice | None,
    lookup: LookupAcceptance | None = None,
) -> Choice:
    """As if all sequences of the target were alike, of which only a `share` can draft, and only the share `in_time` of
    proposals came. `chances` are those of a draft's tokens, by place; `before` is the last choice.

    Where lookup finds something, the draft is not asked. What is found costs nothing but its verification: a token is
    verified where that takes less time than it is expected to save, at the rate of the last choice.
    """
    if lookup is None:
        return _choose(cycle, chances, share, in_time, before)
    worth = cycle.row * (before.rate if before is not None else cycle.count / cycle.verification())
    expected = list(takewhile(lambda chance: chance > worth, accumulate(lookup.chances, mul)))
    found = share * lookup.share
    choices = [
        _choose(cycle, chances, share, in_time, before),
        _choose(cycle, chances, share, in_time, before, found, found * len(expected), found * sum(expected)),
    ]
    for choice, length in zip(choices, (0, len(expected)), strict=True):
        choice.lookup = length
    return max(choices, key=lambda choice: choice.rate)


def _choose(
    cycle: Cycle,
    chances: list[float],
    share: float,
    in_time: float,
    before: Choice | None,
    found: float = 0.0,
    proposed: float = 0.0,
    saved: float = 0.0,
) -> Choice:
    """Where lookup finds something in a share `found` of all rounds, `proposed` tokens in a round on average, of which
    `saved` are accepted."""
    plain = cycle.count / cycle.verification()
    undrafted_seconds = cycle.verification(proposed)
    undrafted = cycle.count * (1 + saved) / undrafted_seconds

    def waiting(drafted: float, accepted: float) -> float:
        worth = (1 + accepted / (1 + saved)) * undrafted_seconds
        return max(0.0, (worth - cycle.verification(proposed + drafted)) / cycle.parts)

    best: Choice | None = None
    for length, chance in enumerate(accumulate(accumulate(chances, mul)) if share else (), 1):
        accepted, drafted = (share - found) * chance, (share - found) * length
        seconds = cycle.verification(proposed + drafted) + cycle.drafting(length, share)
        rate = cycle.count * (1 + saved + in_time * accepted) / seconds
        if best is None or rate > best.rate:
            best = Choice(length, rate, rate / plain, waiting(drafted, accepted))
    # To begin, drafting must promise more than one observation can change an estimate by.
    if best is not None and best.rate > undrafted * (1.0 if before and before.length else 1 / FORGET):
        return best
    near = best if best is not None and best.rate > _WORTH_A_TRIAL * undrafted else None
    return Choice(0, undrafted, undrafted / plain, waiting(1 / cycle.count, 0.5), near)
