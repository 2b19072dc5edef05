"""How many replicas a load needs, from what the scheduler measures: a law without clock, I/O or state."""

from __future__ import annotations

import math
from dataclasses import dataclass

# If a single sequence misses the latency target, its own latency plus some slack becomes the target.
_SLACK_OVER_ALONE = 1.25
# Drafting must save at least this share of the targets.
_MIN_SAVING = 0.05
_MAX_STRETCH = 4.0
_MAX_SEQUENCES = 1e6
_MAX_NUMBER = 1e9
_ACCEPTANCE_STEPS = 20
_LONGEST_DRAFT = 16
_AHEAD_SECONDS = 10.0


def expected_commit(rate: float, draft_length: int) -> float:
    """Tokens a round is expected to commit: 1 + rate + rate**2 ... up to the draft length."""
    if rate >= 1:
        return draft_length + 1.0
    return float((1 - rate ** (draft_length + 1)) / (1 - rate))


@dataclass(frozen=True, slots=True)
class CellFigures:
    """What a scheduler knows of its cell. Times are seconds, NaN is what was not measured.

    Load: `running` sequences are worked on and `waiting` ones are not yet, `growth` more come each second than go,
    `tokens_per_second` are delivered, `offered_tokens_per_second` asked for, `tokens_per_sequence` an answer has.
    Rounds: `drafted_per_round` tokens are proposed and `accepted_per_round` taken; `acceptance` is the chance of one.
    Steps: a target's takes `target_base` and `target_row` a row, a draft's `draft_pass` a pass and `draft_row` a row in
    it. `room`: sequences whose KV fits one target. `target_busy`, `draft_busy`: shares of the time with a step.
    `stretch`: how many times as long as by these laws a token takes.
    """

    targets: int = 0
    drafts: int = 0
    running: float = 0.0
    waiting: float = 0.0
    growth: float = 0.0
    tokens_per_second: float = 0.0
    offered_tokens_per_second: float = 0.0
    tokens_per_sequence: float = math.nan
    seconds_per_token: float = math.nan
    acceptance: float = math.nan
    drafted_per_round: float = 0.0
    accepted_per_round: float = 0.0
    target_base: float = math.nan
    target_row: float = math.nan
    draft_pass: float = math.nan
    draft_row: float = math.nan
    batch_size: int = 8
    draft_length: int = 0
    room: float = math.nan
    target_busy: float = 0.0
    draft_busy: float = 0.0
    stretch: float = 1.0


@dataclass(frozen=True, slots=True)
class Goals:
    """The latencies to hold at minimal cost: `token_seconds` a token and `queue_seconds` in the queue at most.

    No more than `max_targets` will be there.
    """

    token_seconds: float = 0.05
    queue_seconds: float = 2.0
    target_cost: float = 1.0
    draft_cost: float = 1.0
    max_targets: int = 4096


@dataclass(frozen=True, slots=True)
class Needs:
    """Replicas that the load would keep wholly busy, not rounded, and what they come from.

    `targets` are needed for `sequences` (those expected soon), of which one holds `per_target` at `token_seconds` a
    token; None where no target was measured. `drafts` are needed to draft `draft_length` tokens a round, which saves
    `saved_targets`; None where no draft was measured. `queue_seconds` is the wait of the last that waits.
    """

    targets: float | None
    drafts: float | None
    sequences: float
    per_target: float
    token_seconds: float
    queue_seconds: float
    draft_length: int
    saved_targets: float


@dataclass(frozen=True, slots=True)
class RoundLaw:
    """Seconds of a round of all sequences of a target, each with a draft of one length.

    Steps of at most `batch` sequences are verified one after the other, while the drafts propose for the others; no
    sequence is through sooner than its own draft and verify step.
    """

    base: float
    per_sequence: float
    drafting: float
    drafting_per_sequence: float
    batch: float

    def seconds(self, sequences: float) -> float:
        verifying = max(1.0, sequences / self.batch) * self.base + self.per_sequence * sequences
        return max(verifying, self._way(min(sequences, self.batch)))

    def sequences_within(self, seconds: float) -> float:
        """The most sequences whose round takes no longer, at least 1."""
        most = seconds / max(self.base / self.batch + self.per_sequence, 1e-12)
        if most < self.batch:
            most = (seconds - self.base) / max(self.per_sequence, 1e-12)
        if self._way(self.batch) > seconds:
            slope = self.per_sequence + self.drafting_per_sequence
            most = min(most, (seconds - self._way(0.0)) / max(slope, 1e-12))
        return min(max(most, 1.0), _MAX_SEQUENCES)

    def _way(self, in_step: float) -> float:
        return self.base + self.drafting + (self.per_sequence + self.drafting_per_sequence) * in_step


def needs(figures: CellFigures, goals: Goals) -> Needs:
    """Raises nothing, whatever the figures are: what is no number counts as not measured."""
    running, waiting = _positive(figures.running), _positive(figures.waiting)
    law = round_law(figures, _positive(figures.drafted_per_round))
    if law is None:
        return Needs(None, None, running + waiting, 0.0, goals.token_seconds, 0.0, 0, 0.0)
    commit = 1.0 + _positive(figures.accepted_per_round)
    stretch = bounded_stretch(figures.stretch)
    allowed = max(goals.token_seconds, _SLACK_OVER_ALONE * stretch * law.seconds(1.0) / commit)
    room = max(_positive(figures.room, _MAX_SEQUENCES), 1.0)

    answer_seconds = _positive(figures.tokens_per_sequence, math.inf) * allowed
    soon = waiting * min(1.0, answer_seconds / max(goals.queue_seconds, 1e-9)) if waiting else 0.0
    sequences = running + soon + _positive(figures.growth) * _AHEAD_SECONDS

    def targets_for(law: RoundLaw, commit: float) -> tuple[float, float]:
        held = min(law.sequences_within(allowed * commit / stretch), room)
        return sequences / held, held

    targets, per_target = targets_for(law, commit)
    plain = round_law(figures, 0.0)
    assert plain is not None
    drafting = _Drafting(figures, goals, sequences, allowed, targets_for(plain, 1.0)[0], stretch, room)
    drafts, length, saved = drafting.best(_positive(figures.acceptance))
    if drafts is not None:
        drafts *= min(1.0, goals.max_targets / targets) if targets else 1.0
    wait = waiting * _positive(figures.tokens_per_sequence) / max(_positive(figures.tokens_per_second), 1e-9)
    return Needs(targets, drafts, sequences, per_target, allowed, wait if waiting else 0.0, length, saved)


def round_law(figures: CellFigures, draft_length: float) -> RoundLaw | None:
    """None where steps of the targets were not measured."""
    base, row = _positive(figures.target_base, math.nan), _positive(figures.target_row)
    if math.isnan(base) or base + row == 0.0:
        return None
    return RoundLaw(
        base=base,
        per_sequence=row * (1.0 + draft_length),
        drafting=_positive(figures.draft_pass) * draft_length,
        drafting_per_sequence=_positive(figures.draft_row) * draft_length,
        batch=max(1.0, _positive(figures.batch_size, 1.0)),
    )


def bounded_stretch(stretch: float) -> float:
    """What is taken for true of a measured stretch."""
    return min(max(_positive(stretch, 1.0), 1.0), _MAX_STRETCH)


@dataclass(frozen=True, slots=True)
class _Drafting:
    """What drafts are worth: the targets that they save, against their own number."""

    figures: CellFigures
    goals: Goals
    sequences: float
    allowed: float
    plain_targets: float
    stretch: float
    room: float

    def best(self, acceptance: float) -> tuple[float | None, int, float]:
        """Drafts needed, tokens that they draft a round, and the targets that saves.

        As many as pay at this acceptance or a poorer one: a round with less accepted is worth less, and must not ask
        for more drafts because there are more such rounds.
        """
        if math.isnan(_positive(self.figures.draft_pass, math.nan)):
            return None, 0, 0.0
        acceptance = min(acceptance, 1.0)
        drafts, length, saved = self._at(acceptance)
        for step in range(1, _ACCEPTANCE_STEPS):
            poorer = step / _ACCEPTANCE_STEPS
            if poorer < acceptance:
                drafts = max(drafts, self._at(poorer)[0])
        return drafts, length, saved

    def _at(self, acceptance: float) -> tuple[float, int, float]:
        goals, found = self.goals, (0.0, 0, 0.0)
        best_value = _MIN_SAVING * self.plain_targets * goals.target_cost
        for length in range(1, min(_LONGEST_DRAFT, int(_positive(self.figures.draft_length))) + 1):
            law = round_law(self.figures, length)
            assert law is not None
            seconds = self.allowed * expected_commit(acceptance, length) / self.stretch
            held = min(law.sequences_within(seconds), self.room)
            drafts = self.sequences / self._held_by_draft(law, seconds, held)
            saved = self.plain_targets - self.sequences / held
            value = saved * goals.target_cost - drafts * goals.draft_cost
            if value > best_value:
                best_value, found = value, (drafts, length, saved)
        return found

    def _held_by_draft(self, law: RoundLaw, seconds: float, held: float) -> float:
        """Sequences that one draft proposes for in time: in two steps a round, or in one and then they wait for it."""
        verifying = law.base + law.per_sequence * min(held, law.batch)
        left = max(seconds - 2 * law.drafting, seconds - verifying - law.drafting)
        return min(max(left / max(law.drafting_per_sequence, 1e-12), 1.0), _MAX_SEQUENCES)


def _positive(value: float, otherwise: float = 0.0) -> float:
    """The number if it is one and not below 0; none so large that reckoning with it could overflow."""
    return min(float(value), _MAX_NUMBER) if math.isfinite(value) and value >= 0 else otherwise
