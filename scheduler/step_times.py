"""What steps of target and draft workers cost, and what rounds yield, as measured while running."""

from __future__ import annotations

import math
from collections import deque

from scheduler.cost_fit import CostFit, Features

_RECENT = 9
_FORGET_ROUND = 0.995
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_WEIGHT = 4.0
_ENOUGH = 2
_NOISE = 0.02


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

    Rows to verify and prefill differ because only the former need logits; raggedness costs on backends that pad. The
    sum of KV lengths is left out: attention is a small part of a pass at serving lengths, and the bins of the fit
    follow its slow growth.

    With `alone`, the times of the same target's steps while no other worker computes on its cores, these are those of
    steps beside others: one law for both, so that each learns from the other, in which the latter take longer.
    """

    def __init__(self, initial_seconds: float, alone: TargetTimes | None = None) -> None:
        self._beside = alone is not None
        shares = (0.75, 0.25, 0.1, 0.0, 0.0, 0.05, 0.02)
        self._fit: CostFit = CostFit(initial_seconds, shares) if alone is None else alone._fit
        self._recent = RecentMedian(initial_seconds)
        self._observed = 0
        self.typical = initial_seconds
        """Median seconds of the last steps that verified."""

    @property
    def known(self) -> bool:
        return self._observed >= _ENOUGH

    @property
    def base(self) -> float:
        """Seconds of a step without rows."""
        return self._fit.predict(self._features(0, 0, 0.0))

    @property
    def per_row(self) -> float:
        """Seconds of one more row to verify; 0 before anything was measured."""
        coefficients = self._fit.coefficients
        if coefficients is None:
            return 0.0
        return coefficients[1] + coefficients[5] if self._beside else coefficients[1]

    @property
    def ragged_extra(self) -> float:
        """Seconds on top when the rows' lengths differ; next to nothing is taken for noise."""
        coefficients = self._fit.coefficients
        return coefficients[3] if coefficients and coefficients[3] > _NOISE * coefficients[0] else 0.0

    def observe(self, verify_rows: int, equal_length: bool, prefill_rows: int, seconds: float) -> None:
        if not math.isfinite(seconds) or seconds < 0:
            return
        self._observed += 1
        self._fit.observe(self._features(verify_rows, prefill_rows, 0.0 if equal_length else 1.0), seconds)
        if verify_rows:
            self._recent.observe(seconds)
            self.typical = self._recent.value

    def predict(self, verify_rows: float, equal_length: bool = True, prefill_rows: float = 0.0) -> float:
        return self._fit.predict(self._features(verify_rows, prefill_rows, 0.0 if equal_length else 1.0))

    def _features(self, verify_rows: float, prefill_rows: float, ragged: float) -> Features:
        if self._beside:
            return (1.0, verify_rows, prefill_rows, ragged, 1.0, verify_rows, prefill_rows)
        return (1.0, verify_rows, prefill_rows, ragged, 0.0, 0.0, 0.0)


class DraftTimes:
    """Step seconds of one draft worker: so much a pass, so much a row and pass, so much a row that catches up.

    A step takes as many passes as its longest proposal has tokens; a row takes part in as many as its own has. `alone`
    as in `TargetTimes`.
    """

    def __init__(self, initial_seconds: float, alone: DraftTimes | None = None) -> None:
        self._beside = alone is not None
        shares = (0.9, 0.1, 0.1, 0.05, 0.02, 0.02)
        self._fit: CostFit = CostFit(initial_seconds, shares) if alone is None else alone._fit
        self._observed = 0

    @property
    def known(self) -> bool:
        return self._observed >= _ENOUGH

    @property
    def base(self) -> float:
        """Seconds of a pass without rows."""
        return self._fit.predict(self._features(1.0, 0.0, 0.0))

    @property
    def per_row(self) -> float:
        """Seconds of one more row in one pass; 0 before anything was measured."""
        coefficients = self._fit.coefficients
        if coefficients is None:
            return 0.0
        return coefficients[1] + coefficients[4] if self._beside else coefficients[1]

    def observe(self, passes: int, row_passes: int, catch_up_rows: int, seconds: float) -> None:
        self._observed += 1
        self._fit.observe(self._features(passes, row_passes, catch_up_rows), seconds)

    def predict(self, passes: float, row_passes: float, catch_up_rows: float = 0.0) -> float:
        return self._fit.predict(self._features(passes, row_passes, catch_up_rows))

    def _features(self, passes: float, row_passes: float, catch_up_rows: float) -> Features:
        if self._beside:
            return (passes, row_passes, catch_up_rows, passes, row_passes, catch_up_rows)
        return (passes, row_passes, catch_up_rows, 0.0, 0.0, 0.0)


class Acceptance:
    """The chance that a token asked of a draft is proposed and taken by the target, given those before it were."""

    def __init__(self) -> None:
        self._taken = _PRIOR_ACCEPTANCE * _PRIOR_WEIGHT
        self._tried = _PRIOR_WEIGHT
        self.rate = _PRIOR_ACCEPTANCE

    def fade(self, share: float) -> None:
        """Lets what was seen count less, without changing the rate."""
        self._taken *= share
        self._tried *= share

    def observe(self, asked: int, accepted: int) -> None:
        if asked:
            self._taken = self._taken * _FORGET_ROUND + accepted
            self._tried = self._tried * _FORGET_ROUND + accepted + (accepted < asked)
            self.rate = self._taken / self._tried


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
