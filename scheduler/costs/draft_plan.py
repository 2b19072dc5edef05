"""How many tokens to draft, by cost: the plan with which one target is expected to commit most tokens a second.

The model of a round is a simple one. With n sequences on a target, a *cycle* is the time in which each of them has one
round, and the rate is the tokens that all are expected to commit in it, divided by its seconds. Costs are linear: a
target step takes base + per_token · batched tokens, a draft step passes · (per_pass + per_token · sequences); each
worker answers an idle scheduler `overhead` seconds later than its step ends (the wire).

- One group (n fits a step). *Merged*: all draft, then all are verified, one after the other: cycle = draft + verify.
  *Split*: one half drafts while the other is verified, then they swap: cycle = the longest of the two verifications,
  the two drafts, and the way of one half through both. *Free*, where some decode plainly: these go round again while
  the others draft.
- Several groups: draft and target overlap. cycle = the longest of all verifications, all drafts (two draft steps: one
  for those that were verified while the other ran), and the way of one group through both.
- Where the two share cores they may also be *time-sliced*: each step is exclusive and has costs of its own. cycle = all
  drafts in one step + all verifications. Without drafts, the target computes exclusively anyway.
- Sequences come and go, and so many tokens of prompt come for each that is committed. The target prefills them in the
  steps in which it verifies, as long as these suffice; the draft has to take them in as well.

The k-th draft token of a row adds acceptance**k expected tokens and costs its packed row on the target, if the draft
proposes it at all, and on the draft where the draft is not hidden. At the best rate λ a second is worth λ tokens, so
the token pays if acceptance**k is at least λ · its seconds (Dinkelbach's method for ratios). For each number of passes,
such a price and a least acceptance below which sequences decode plainly, the rate is computed as above; the best one is
the plan.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from scheduler.costs.step_times import expected_commit

_GAIN_TO_STAY = 1.02
GAIN_TO_START = 1.06
"""Speculation must promise so much more than plain decoding: predictions are not exact, and the best look too good."""
_MIN_PRICE = 0.02
_MIN_SECONDS = 1e-9
_ROUNDS_OF_PRICING = 2
_DRAFT_MATTERS = 0.7
"""Of the target's time in a cycle, the draft's; from there on fragments of draft steps would hold the cell up."""
_DOUBT_OF_TIME_SLICING = 0.04
"""Added to what a change to time-sliced speculation must promise. A wrong one costs most: nothing hides the draft."""
_DOUBT_OF_OVERLAP = 0.08
"""The same for overlapping on shared cores: how much both slow down depends on what they do."""
_PREFER_FIRST = 1.1
"""A more intricate way to go round must be so much faster."""

AcceptanceGroups = list[tuple[float, int]]
"""Acceptance, and how many sequences have about that one; ascending."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of target and draft steps."""

    base: float
    per_token: float
    draft_per_pass: float
    draft_per_token: float
    per_prefill_token: float = 0.0
    draft_per_prompt_token: float = 0.0


@dataclass(frozen=True, slots=True)
class CellCosts:
    """One target as the plan sees it. Times are seconds.

    `sequences` decode on it and `coming` are being prefilled; a step takes `batch_size` sequences and
    `max_num_batched_tokens` tokens. `targets_per_draft` targets share a draft worker. Of the tokens asked of drafts,
    `proposed_share` are verified. For each token of output, sequences bring `prompt_share` tokens of prompt, and a step
    takes `prefill_chunk` of these. `shared` are the costs of steps while the other kind of worker computes as well,
    `exclusive` those while it does not, where that makes a difference.
    """

    sequences: int
    batch_size: int
    max_num_batched_tokens: int
    overhead: float
    draft_overhead: float
    targets_per_draft: float
    shared: StepCosts
    exclusive: StepCosts | None = None
    proposed_share: float = 1.0
    prompt_share: float = 0.0
    prefill_chunk: int = 96
    coming: int = 0


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Draft lengths by acceptance, and how groups are formed to fit.

    `thresholds` are ascending: a k-th token is drafted where the acceptance is at least the k-th of them. `merged`: the
    sequences fit one step and do best in one. `split`: they do best in two halves. `time_sliced`: draft and target
    compute one at a time. `full_draft_step` sequences make a full draft step; 0 where drafting is no bottleneck.
    `rate` and `plain_rate` are expected tokens per second, with this plan and without any draft. `cycle` is the seconds
    in which every sequence has a round.
    """

    thresholds: tuple[float, ...]
    merged: bool
    split: bool
    time_sliced: bool
    full_draft_step: float
    rate: float
    plain_rate: float
    cycle: float

    def length(self, acceptance: float) -> int:
        return bisect_right(self.thresholds, acceptance)


@dataclass(frozen=True, slots=True)
class CatchUp:
    """What comes before drafting on shared cores.

    For `seconds` the draft's KV catches up, while the target verifies slowly or not at all.

    Time-sliced, the draft takes a step in each of `rounds`. A sequence decodes plainly until its KV is there: on
    average for half of the rounds. The sequences end in `rounds_left`.
    """

    seconds: float
    rounds: float
    rounds_left: float

    def least_gain(self, least_gain: float, cycle: float) -> float:
        """What drafting must promise to make up for it in the rounds that are left then; a plain one takes `cycle`."""
        rounds = self.rounds_left - self.rounds / 2
        if rounds <= 0:
            return math.inf
        return 1 + ((least_gain - 1) * self.rounds_left + self.seconds / max(cycle, _MIN_SECONDS)) / rounds


@dataclass(frozen=True, slots=True)
class _Load:
    """What all sequences ask for in one cycle: `batched` tokens to verify, and prompts, of which some are to be drafted
    for."""

    speculating: float
    draft_tokens: float
    batched: float
    passes: int
    prompt_tokens: float
    drafted_prompt_tokens: float


@dataclass(frozen=True, slots=True)
class _Cycle:
    """A way to go round: its seconds, and the rounds that plain rows have in it (the others have one)."""

    seconds: float
    plain_rounds: float = 1.0
    merged: bool = False
    split: bool = False
    time_sliced: bool = False
    full_draft_step: float = 0.0


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to draft or not: expected tokens per second, and the thresholds of a plan."""

    rate: float
    cycle: _Cycle
    thresholds: tuple[float, ...] = ()


def best_plan(
    costs: CellCosts,
    groups: AcceptanceGroups,
    longest: int,
    trust: float = 1.0,
    speculating: bool = False,
    catch_up: CatchUp | None = None,
) -> DraftPlan:
    """The plan with the highest expected rate; no drafting where that is not so much better as to be worth a change, or
    a stay where the target is `speculating` already.

    `trust` is what the rate of a plan with drafts is worth compared with plain decoding, `catch_up` what must be done
    before all can draft. Where plain decoding is best once those that are being prefilled decode as well,
    the tokens that drafts add before must not take longer than they would then, in fuller steps: else drafting only
    holds the newcomers up.
    """
    plain, best = _fastest(costs, groups, 0), _fastest(costs, groups, longest)
    later = None
    if costs.coming and best.thresholds:
        crowd = replace(costs, sequences=costs.sequences + costs.coming, coming=0)
        later = best_plan(crowd, groups, longest, trust, catch_up=catch_up)
    least_gain = _least_gain(costs, plain, best, later, speculating, catch_up)
    holds_up = later is not None and not later.thresholds and _holds_up(plain, best, later, trust, least_gain)
    if holds_up or best.rate * trust < least_gain * plain.rate:
        best = plain
    cycle = best.cycle
    return DraftPlan(
        best.thresholds,
        cycle.merged,
        cycle.split,
        cycle.time_sliced,
        cycle.full_draft_step,
        best.rate,
        plain.rate,
        cycle.seconds,
    )


def _fastest(costs: CellCosts, groups: AcceptanceGroups, longest: int) -> _Way:
    """The way with the highest expected rate, by however little."""
    acceptances = [acceptance for acceptance, _ in groups]
    nothing = (0,) * len(groups)
    best = _Way(*_rate(costs, groups, nothing))
    seen = {nothing}
    for _ in range(_ROUNDS_OF_PRICING if longest else 0):
        for price in _prices(costs, best.rate):
            natural = [price ** (1 / place) for place in range(1, longest + 1)]
            worthwhile = [bisect_right(natural, acceptance) for acceptance in acceptances]
            for passes in _passes(max(worthwhile)):
                for cut in range(len(groups)):
                    lengths = (*nothing[:cut], *(min(passes, length) for length in worthwhile[cut:]))
                    if lengths in seen:
                        continue
                    seen.add(lengths)
                    rate, cycle = _rate(costs, groups, lengths)
                    if rate > best.rate:
                        least = acceptances[cut] if cut else 0.0
                        best = _Way(rate, cycle, tuple(max(least, threshold) for threshold in natural[:passes]))
    return best


def _least_gain(
    costs: CellCosts, plain: _Way, best: _Way, later: DraftPlan | None, speculating: bool, catch_up: CatchUp | None
) -> float:
    """How many times as good as plain decoding the best way must be."""
    gain = _GAIN_TO_STAY if speculating else GAIN_TO_START
    if not best.thresholds or costs.exclusive is None:
        return gain
    if not best.cycle.time_sliced:
        gain += _DOUBT_OF_OVERLAP
        catch_up = None if catch_up is None or speculating else replace(catch_up, rounds=0.0)
    elif not speculating:
        gain += _DOUBT_OF_TIME_SLICING
    if catch_up is None:
        return gain
    plain_round = plain.cycle.seconds if later is None else (costs.sequences + costs.coming) / later.plain_rate
    return catch_up.least_gain(gain, plain_round)


def _holds_up(plain: _Way, best: _Way, later: DraftPlan, trust: float, least_gain: float) -> bool:
    """Whether the tokens that drafts add take longer now than they would `later`."""
    extra_tokens = best.rate * trust * best.cycle.seconds - plain.rate * plain.cycle.seconds
    extra_seconds = best.cycle.seconds - plain.cycle.seconds
    return extra_tokens < least_gain * later.plain_rate * extra_seconds


def _prices(costs: CellCosts, rate: float) -> set[float]:
    """What a draft token must be worth, by which of the two kinds of worker is short of time."""
    prices = set()
    for steps in (costs.shared, costs.exclusive):
        if steps is not None:
            on_target = rate * steps.per_token * costs.proposed_share
            on_draft = rate * steps.draft_per_token * costs.targets_per_draft
            prices |= {max(_MIN_PRICE, price) for price in (on_target, on_draft, on_target + on_draft)}
    return prices


def _passes(most: int) -> Iterable[int]:
    return range(1, most + 1) if most <= 8 else (1, 2, 3, 4, 6, 8, *range(12, most, 8), most)


def _rate(costs: CellCosts, groups: AcceptanceGroups, lengths: tuple[int, ...]) -> tuple[float, _Cycle]:
    """With these lengths: expected tokens per second, and the best way to go round."""
    total = sum(count for _, count in groups)
    speculating, draft_tokens, committed = 0, 0, 0.0
    for (acceptance, count), length in zip(groups, lengths, strict=True):
        if length:
            speculating += count
            draft_tokens += length * count
            committed += expected_commit(acceptance, length) * count
    share = costs.sequences / total
    plain = costs.sequences - speculating * share
    load = _Load(
        speculating=speculating * share,
        draft_tokens=draft_tokens * share,
        batched=costs.sequences + draft_tokens * share * costs.proposed_share,
        passes=max(lengths),
        prompt_tokens=costs.prompt_share * (committed * share + plain),
        drafted_prompt_tokens=costs.prompt_share * committed * share,
    )
    best, best_rate = None, 0.0
    for cycle in _cycles(costs, load):
        rate = (committed * share + plain * cycle.plain_rounds) / max(cycle.seconds, _MIN_SECONDS)
        if best is None or rate > best_rate * _PREFER_FIRST:
            best, best_rate = cycle, rate
    assert best is not None
    return best_rate, best


def _cycles(costs: CellCosts, load: _Load) -> Iterator[_Cycle]:
    count = costs.sequences
    per_step = min(costs.batch_size, costs.max_num_batched_tokens * count / load.batched)
    parts = count / per_step
    if costs.exclusive is not None:
        yield _time_sliced(costs, costs.exclusive, load, parts)
        if not load.passes:
            return
    if count > per_step:
        yield _overlapped(costs, load, max(2.0, parts), parts)
        return
    drafting = _drafting(costs, costs.shared, load, 1)
    if costs.exclusive is None:
        yield _Cycle(drafting + _verifying(costs, costs.shared, load, 1.0) + costs.overhead, merged=True)
    if count >= 2:
        yield _overlapped(costs, load, 2, 2, split=True)
    plain = count - load.speculating
    if load.passes and plain > 0.5:
        base, per_token = costs.shared.base, costs.shared.per_token
        plain_step = base + per_token * plain
        rounds = max(1.0, (drafting + costs.overhead) / max(plain_step + costs.overhead, _MIN_SECONDS))
        between = plain_step if rounds == 1 else rounds * (plain_step + costs.overhead)
        yield _Cycle(_verifying(costs, costs.shared, load, 1.0) - per_token * plain + between, rounds)


def _verifying(costs: CellCosts, steps: StepCosts, load: _Load, verify_steps: float) -> float:
    """The target's seconds for all rows; prefill goes with verification as long as there is enough of that."""
    target_steps = max(verify_steps, load.prompt_tokens / costs.prefill_chunk)
    return target_steps * steps.base + steps.per_token * load.batched + steps.per_prefill_token * load.prompt_tokens


def _drafting(costs: CellCosts, steps: StepCosts, load: _Load, draft_steps: int) -> float:
    """The draft's seconds for all proposals, in so many steps, without what it takes to take in prompts."""
    if not load.passes:
        return 0.0
    rows = load.draft_tokens * costs.targets_per_draft
    return draft_steps * (load.passes * steps.draft_per_pass + costs.draft_overhead) + steps.draft_per_token * rows


def _taking_in(costs: CellCosts, steps: StepCosts, load: _Load) -> float:
    """The draft's seconds for the prompts of those that will draft."""
    return load.drafted_prompt_tokens * costs.targets_per_draft * steps.draft_per_prompt_token


def _time_sliced(costs: CellCosts, steps: StepCosts, load: _Load, parts: float) -> _Cycle:
    merged = parts <= 1
    seconds = _verifying(costs, steps, load, max(1.0, parts))
    seconds += _drafting(costs, steps, load, 1) + _taking_in(costs, steps, load)
    # Steps are queued one ahead: the wire shows only where there is one step at a time, or where they are time-sliced.
    if merged or load.passes:
        seconds += costs.overhead
    return _Cycle(seconds, merged=merged, time_sliced=True)


def _overlapped(costs: CellCosts, load: _Load, steps: float, parts: float, split: bool = False) -> _Cycle:
    """A cycle of so many target steps, while two draft steps run; one step takes one of `parts` of all rows."""
    law = costs.shared
    verifying = _verifying(costs, law, load, steps)
    way = law.base + law.per_token * load.batched / parts + costs.overhead
    if not load.passes:
        return _Cycle(max(verifying, way), split=split)
    drafting = _drafting(costs, law, load, 2) + _taking_in(costs, law, load)
    way += load.passes * law.draft_per_pass + costs.draft_overhead
    way += law.draft_per_token * load.draft_tokens * costs.targets_per_draft / parts
    full_draft_step = load.speculating * costs.targets_per_draft / 2 if drafting > _DRAFT_MATTERS * verifying else 0.0
    return _Cycle(max(verifying, drafting, way), split=split, full_draft_step=full_draft_step)
