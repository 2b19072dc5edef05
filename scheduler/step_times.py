"""What steps of target and draft workers cost, and what rounds yield, as measured while running."""

from __future__ import annotations

import math
from collections import deque

from scheduler.cost_fit import CostFit, Features

_RECENT = 9
_FORGET_ROUND = 0.995
_FORGET_SEQUENCE = 0.97
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_WEIGHT = 4.0
_LEAST_TRIED = 10.0
_ENOUGH = 2
_NOISE = 0.02
_TARGET_PRIOR = (1.0, 0.05, 0.03, 0.0, 0.5, 0.05, 0.03)
_DRAFT_PRIOR = (1.0, 0.05, 0.03, 0.5, 0.05, 0.03)
"""Proportions of what steps cost: base or pass, and rows; then what all of these cost more beside others.

Reading the weights once costs as much as the arithmetic of many rows, and of two that share cores each has half.
"""


class RecentMedian:
    """Lower median of the last values, so that one slow step (a compilation, say) does not count."""

    def __init__(self, initial: float) -> None:
        self._values = deque([initial], maxlen=_RECENT)
        self.value = initial

    def observe(self, value: float) -> None:
        self._values.append(value)
        self.value = sorted(self._values)[(len(self._values) - 1) // 2]


class TargetTimes:
    """Step seconds of one target: a base, so much a verified row, so much a row of prefill, and a ragged group's extra.

    Raggedness costs on backends that pad. KV lengths are left out: attention is a small part of a step that verifies,
    and the bins of the fit follow its slow growth. In prefill it is a large one, by which steps of the same rows differ
    several times; so steps that only verify have a law of their own.

    With `alone`, the times of the same target's steps while no other worker computes on its cores, these are those of
    steps beside others: one law for both, so that each learns from the other, in which the latter take longer.
    """

    def __init__(self, initial_seconds: float, alone: TargetTimes | None = None) -> None:
        self._beside = 0.0 if alone is None else 1.0
        self._verifying: CostFit = CostFit(initial_seconds, _TARGET_PRIOR) if alone is None else alone._verifying
        self._prefilling: CostFit = CostFit(initial_seconds, _TARGET_PRIOR) if alone is None else alone._prefilling
        self._recent = RecentMedian(initial_seconds)
        self.typical = initial_seconds
        """Median seconds of the last steps that verified."""

    @property
    def base(self) -> float:
        """Seconds of a step without rows."""
        return self.predict(0)

    @property
    def per_row(self) -> float:
        """Seconds of one more row to verify; 0 before anything was measured."""
        coefficients = self._fit(prefilling=False).coefficients
        return 0.0 if coefficients is None else coefficients[1] + self._beside * coefficients[5]

    @property
    def per_prefill_row(self) -> float:
        """Seconds of one more row of prefill; 0 before anything was measured."""
        coefficients = self._fit(prefilling=True).coefficients
        return 0.0 if coefficients is None else coefficients[2] + self._beside * coefficients[6]

    @property
    def ragged_extra(self) -> float:
        """Seconds on top when the rows' lengths differ; next to nothing is taken for noise."""
        coefficients = self._fit(prefilling=False).coefficients
        return coefficients[3] if coefficients and coefficients[3] > _NOISE * coefficients[0] else 0.0

    def observe(self, verify_rows: int, equal_length: bool, prefill_rows: int, seconds: float) -> None:
        if not math.isfinite(seconds) or seconds < 0:
            return
        fit = self._prefilling if prefill_rows else self._verifying
        fit.observe(self._features(verify_rows, prefill_rows, equal_length), seconds)
        if verify_rows:
            self._recent.observe(seconds)
            self.typical = self._recent.value

    def predict(self, verify_rows: float, equal_length: bool = True, prefill_rows: float = 0.0) -> float:
        return self._fit(prefill_rows > 0).predict(self._features(verify_rows, prefill_rows, equal_length))

    def _fit(self, prefilling: bool) -> CostFit:
        if prefilling:
            return _known(self._prefilling, self._verifying)
        return _known(self._verifying, self._prefilling)

    def _features(self, verify_rows: float, prefill_rows: float, equal_length: bool) -> Features:
        beside = self._beside
        ragged = 0.0 if equal_length else 1.0
        return (1.0, verify_rows, prefill_rows, ragged, beside, beside * verify_rows, beside * prefill_rows)


class DraftTimes:
    """Step seconds of one draft worker: so much a pass, so much a row and pass, so much a row that catches up.

    A step takes as many passes as its longest proposal has tokens; a row takes part in as many as its own has. Steps
    that mostly catch up have a law of their own, and `alone` means the same, as in `TargetTimes`.
    """

    def __init__(self, initial_seconds: float, alone: DraftTimes | None = None) -> None:
        self._beside = 0.0 if alone is None else 1.0
        self._proposing: CostFit = CostFit(initial_seconds, _DRAFT_PRIOR) if alone is None else alone._proposing
        self._catching_up: CostFit = CostFit(initial_seconds, _DRAFT_PRIOR) if alone is None else alone._catching_up
        self._observed = 0

    @property
    def known(self) -> bool:
        return self._observed >= _ENOUGH

    @property
    def base(self) -> float:
        """Seconds of a pass without rows."""
        return self.predict(1.0, 0.0)

    @property
    def per_row(self) -> float:
        """Seconds of one more row in one pass; 0 before anything was measured."""
        coefficients = self._fit(catching_up=False).coefficients
        return 0.0 if coefficients is None else coefficients[1] + self._beside * coefficients[4]

    @property
    def per_catch_up_row(self) -> float:
        """Seconds of one more committed token whose KV was missing; 0 before anything was measured."""
        coefficients = self._fit(catching_up=True).coefficients
        return 0.0 if coefficients is None else coefficients[2] + self._beside * coefficients[5]

    def observe(self, passes: int, row_passes: int, catch_up_rows: int, seconds: float) -> None:
        self._observed += 1
        fit = self._catching_up if _mostly_catches_up(row_passes, catch_up_rows) else self._proposing
        fit.observe(self._features(passes, row_passes, catch_up_rows), seconds)

    def predict(self, passes: float, row_passes: float, catch_up_rows: float = 0.0) -> float:
        fit = self._fit(_mostly_catches_up(row_passes, catch_up_rows))
        return fit.predict(self._features(passes, row_passes, catch_up_rows))

    def _fit(self, catching_up: bool) -> CostFit:
        if catching_up:
            return _known(self._catching_up, self._proposing)
        return _known(self._proposing, self._catching_up)

    def _features(self, passes: float, row_passes: float, catch_up_rows: float) -> Features:
        beside = self._beside
        return (passes, row_passes, catch_up_rows, beside * passes, beside * row_passes, beside * catch_up_rows)


def _mostly_catches_up(row_passes: float, catch_up_rows: float) -> bool:
    """Rather than taking in what the last rounds committed, at most two tokens a row."""
    return catch_up_rows > 2 * row_passes


def _known(law: CostFit, other: CostFit) -> CostFit:
    """`other` stands in for a law that has seen nothing."""
    return other if law.coefficients is None else law


class Acceptance:
    """The chance that a token asked of a draft is proposed and taken by the target, given those before it were."""

    def __init__(self) -> None:
        self._taken = _PRIOR_ACCEPTANCE * _PRIOR_WEIGHT
        self._tried = _PRIOR_WEIGHT
        self.rate = _PRIOR_ACCEPTANCE

    def fade(self, share: float) -> None:
        """Lets what was seen count less, without changing the rate, but not so little that few tokens outweigh it."""
        if self._tried * share >= _LEAST_TRIED:
            self._taken *= share
            self._tried *= share

    def observe(self, taken: float, tried: float) -> None:
        """Of so many draft tokens; a token counts as tried if those before it were taken."""
        if tried:
            self._taken = self._taken * _FORGET_ROUND + taken
            self._tried = self._tried * _FORGET_ROUND + tried
            self.rate = self._taken / self._tried


class PromptShare:
    """Tokens of prompts for each token of output, over the sequences that have ended, older ones less."""

    def __init__(self) -> None:
        self._prompts = self._outputs = 0.0

    @property
    def rate(self) -> float:
        """0 before the first sequence has ended."""
        return self._prompts / self._outputs if self._outputs else 0.0

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        self._prompts = self._prompts * _FORGET_SEQUENCE + prompt_tokens
        self._outputs = self._outputs * _FORGET_SEQUENCE + output_tokens


class ProposedShare:
    """Of the tokens asked of drafts, the share that they propose: prompt lookup often has nothing to say."""

    def __init__(self) -> None:
        self._asked = self._proposed = _PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        return self._proposed / self._asked

    def observe(self, asked: int, proposed: int) -> None:
        self._asked = self._asked * _FORGET_ROUND + asked
        self._proposed = self._proposed * _FORGET_ROUND + proposed


def expected_commit(rate: float, draft_length: int) -> float:
    """Tokens a round is expected to commit: 1 + rate + rate**2 ... up to the draft length."""
    if rate >= 1:
        return draft_length + 1.0
    return float((1 - rate ** (draft_length + 1)) / (1 - rate))
