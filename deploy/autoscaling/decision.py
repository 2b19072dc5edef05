"""From needs to numbers of replicas, with hysteresis. The past is passed in and handed back, and so is the time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from deploy.autoscaling.capacity import CellFigures, Goals, Needs, needs
from deploy.autoscaling.recent import RATE_SECONDS

# Rounding of floats must not ask for one replica more.
_ROUNDING = 1e-6
# A step down whose load came back within this time, with no more offered than before, was a mistake.
_TRIAL_SECONDS = 120.0
_SAME_LOAD = 1.25
_LESS_LOAD = 0.8


@dataclass(frozen=True, slots=True)
class GroupRules:
    """Bounds and pace of one group.

    More replicas are wanted when these would be used for more than `utilisation` for `upscale_delay` seconds, fewer
    when the fewer ones would be used for no more than `utilisation - hysteresis` for `downscale_delay` seconds.
    """

    min_replicas: int = 1
    max_replicas: int = 4
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    utilisation: float = 0.85
    hysteresis: float = 0.2


@dataclass(frozen=True, slots=True)
class Rules:
    """A group that is None keeps its number."""

    target: GroupRules | None = None
    draft: GroupRules | None = None
    goals: Goals = field(default_factory=Goals)


@dataclass(frozen=True, slots=True)
class Sample:
    """What was wanted at a time: no fewer than `least` and no more than `most`."""

    time: float
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class GroupPast:
    """What a group was seen to need since `began`, and the number that followed."""

    began: float | None = None
    samples: tuple[Sample, ...] = ()
    wanted: int | None = None


@dataclass(frozen=True, slots=True)
class StepDown:
    """Targets were fewer from `time` on, `before` that there were more, at so many offered tokens a second."""

    time: float
    before: int
    offered: float


@dataclass(frozen=True, slots=True)
class Rise:
    """More targets are on their way, however long they take; until `until` the figures are of that time. `stretch` was
    as it began."""

    until: float
    stretch: float


@dataclass(frozen=True, slots=True)
class Past:
    """All that a decision needs to know of those before it. `proven`: with fewer targets that load was not held."""

    target: GroupPast = field(default_factory=GroupPast)
    draft: GroupPast = field(default_factory=GroupPast)
    stepped_down: StepDown | None = None
    proven: StepDown | None = None
    rise: Rise | None = None


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """The group is to have between `at_least` and `at_most` replicas, so `wanted` ones. `now` is without the past."""

    wanted: int
    at_least: int
    at_most: int
    now: Sample


@dataclass(frozen=True, slots=True)
class Decision:
    """None for a group that keeps its number."""

    target: GroupDecision | None
    draft: GroupDecision | None
    needs: Needs


_GroupStep = tuple[GroupDecision, GroupPast]


def decide(figures: CellFigures, rules: Rules, past: Past, now: float) -> tuple[Decision, Past]:
    """Raises nothing, whatever the figures are. `now` is monotonic, in seconds; one before the last counts as that."""
    now = max([now, *(group.samples[-1].time for group in (past.target, past.draft) if group.samples)])
    max_targets = rules.target.max_replicas if rules.target is not None else max(1, figures.targets)
    rise = _rise(figures, past, now)
    if rise is not None:
        figures = replace(figures, stretch=min(figures.stretch, rise.stretch))
    found = needs(figures, replace(rules.goals, max_targets=max_targets))
    target = draft = None
    target_past, draft_past = past.target, past.draft
    stepped_down, proven = past.stepped_down, past.proven
    offered = figures.offered_tokens_per_second
    if rules.target is not None:
        if proven is not None and not offered >= _LESS_LOAD * proven.offered:
            proven = None
        # A target without a sequence helps nobody.
        useful = max(1, math.ceil(found.sequences))
        sample = _sample(found.targets, rules.target, useful, now)
        known = found.targets is not None
        target, target_past = _group(sample, known, rules.target, past.target, figures.targets)
        if proven is not None:
            target = _no_fewer(target, min(proven.before, rules.target.max_replicas), past.target.wanted)
            target_past = replace(target_past, wanted=target.wanted)
        stepped_down, proven = _learn(target, past, stepped_down, proven, offered, now)
        if rise is None and target.wanted > figures.targets:
            rise = Rise(now + RATE_SECONDS, figures.stretch)
    if rules.draft is not None:
        # One draft feeds several targets, never the other way round.
        most = target.wanted if target is not None else max(1, figures.targets)
        sample = _sample(found.drafts, rules.draft, most, now)
        known = found.drafts is not None
        draft, draft_past = _group(sample, known, rules.draft, past.draft, figures.drafts)
    return Decision(target, draft, found), Past(target_past, draft_past, stepped_down, proven, rise)


def _rise(figures: CellFigures, past: Past, now: float) -> Rise | None:
    """What a token takes while more targets are on their way says nothing of what it will take with them."""
    rise = past.rise
    if rise is None:
        return None
    if past.target.wanted is not None and past.target.wanted > figures.targets:
        rise = replace(rise, until=now + RATE_SECONDS)
    return rise if now <= rise.until else None


def _sample(need: float | None, rules: GroupRules, useful: int, now: float) -> Sample:
    """What the need alone asks for; where it is not known, anything will do."""
    if need is None:
        return Sample(now, rules.min_replicas, rules.max_replicas)

    def replicas(utilisation: float) -> int:
        wanted = min(need / max(utilisation, 0.01), float(useful))
        return min(max(math.ceil(wanted - _ROUNDING), rules.min_replicas), rules.max_replicas)

    return Sample(now, replicas(rules.utilisation), replicas(rules.utilisation - rules.hysteresis))


def _group(sample: Sample, known: bool, rules: GroupRules, past: GroupPast, in_use: int) -> _GroupStep:
    """The past begins with the first need that is known: until then the number is taken for right."""
    now, lowest, highest = sample.time, rules.min_replicas, rules.max_replicas
    if past.began is None and not known:
        wanted = min(max(in_use, lowest), highest)
        return GroupDecision(wanted, lowest, highest, sample), replace(past, wanted=wanted)
    began = now if past.began is None else past.began
    kept = now - max(rules.upscale_delay, rules.downscale_delay)
    samples = (*(one for one in past.samples if one.time >= kept), sample)
    at_least, at_most = lowest, highest
    if now - began >= rules.upscale_delay:
        at_least = min(one.least for one in samples if one.time >= now - rules.upscale_delay)
    if now - began >= rules.downscale_delay:
        at_most = max(one.most for one in samples if one.time >= now - rules.downscale_delay)
    # Rules may have changed since the samples.
    at_least = min(max(at_least, lowest), highest)
    at_most = max(min(at_most, highest), at_least)
    wanted = min(max(in_use if past.wanted is None else past.wanted, at_least), at_most)
    return GroupDecision(wanted, at_least, at_most, sample), GroupPast(began, samples, wanted)


def _no_fewer(decision: GroupDecision, number: int, before: int | None) -> GroupDecision:
    """Not fewer than that many, where there are as many already."""
    at_most = max(decision.at_most, number)
    wanted = min(max(before or decision.wanted, decision.at_least), at_most)
    return replace(decision, at_most=at_most, wanted=wanted)


def _learn(
    target: GroupDecision,
    past: Past,
    stepped_down: StepDown | None,
    proven: StepDown | None,
    offered: float,
    now: float,
) -> tuple[StepDown | None, StepDown | None]:
    """Whether the last step down was a mistake: where clients do not wait for answers, fewer replicas make them pile
    up, which cannot be seen before."""
    before = past.target.wanted
    if before is None or target.wanted == before:
        return stepped_down, proven
    if target.wanted < before:
        return StepDown(now, before, offered), proven
    if stepped_down is not None and now - stepped_down.time <= _TRIAL_SECONDS:
        if offered <= _SAME_LOAD * stepped_down.offered:
            proven = stepped_down
        return None, proven
    return stepped_down, proven
