"""What steps of target and draft workers cost, and what rounds yield, as measured while running."""

from __future__ import annotations

import math
from collections import deque

from scheduler.costs.cost_fit import CostFit, Features

_RECENT = 9
_FORGET_ROUND = 0.995
_FORGET_SEQUENCE = 0.97
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_WEIGHT = 4.0
_MIN_TRIED = 10.0
_ENOUGH = 2
_NOISE = 0.02
_TARGET_PRIOR = (1.0, 0.05, 0.03, 0.0, 0.5, 0.05, 0.03)
_DRAFT_PRIOR = (1.0, 0.05, 0.03, 0.5, 0.05, 0.03)
"""Proportions of step costs: base or pass, and tokens; then what each of these costs more in shared steps.

Reading the weights once costs as much as the arithmetic of many tokens, and two workers on shared cores each have half.
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
    """Step seconds of one target: a base, so much a token to verify or to prefill, and a ragged group's extra.

    Raggedness costs on backends that pad. KV lengths are left out: attention is a small part of a step that verifies,
    and the bins of the fit follow its slow growth. In prefill attention is a large part, and steps of equal tokens
    differ several times over; so steps that only verify have a law of their own.

    With `exclusive`, the times of the same target's exclusive steps, this object holds those of shared steps. Both have
    one law, so that each learns from the other; shared steps take longer in it.
    """

    def __init__(self, initial_seconds: float, exclusive: TargetTimes | None = None) -> None:
        self._shared = 0.0 if exclusive is None else 1.0
        self._verifying: CostFit = (
            CostFit(initial_seconds, _TARGET_PRIOR) if exclusive is None else exclusive._verifying
        )
        self._prefilling: CostFit = (
            CostFit(initial_seconds, _TARGET_PRIOR) if exclusive is None else exclusive._prefilling
        )
        self._recent = RecentMedian(initial_seconds)
        self.typical = initial_seconds
        """Median seconds of the last steps that verified."""

    @property
    def base(self) -> float:
        """Seconds of a step without tokens."""
        return self.predict(0)

    @property
    def per_token(self) -> float:
        """Seconds of one more token to verify; 0 before the first measurement."""
        coefficients = self._fit(prefilling=False).coefficients
        return 0.0 if coefficients is None else coefficients[1] + self._shared * coefficients[5]

    @property
    def per_prefill_token(self) -> float:
        """Seconds of one more token of prefill; 0 before the first measurement."""
        coefficients = self._fit(prefilling=True).coefficients
        return 0.0 if coefficients is None else coefficients[2] + self._shared * coefficients[6]

    @property
    def ragged_extra(self) -> float:
        """Additional seconds when the lengths of a group differ; very few are taken for noise."""
        coefficients = self._fit(prefilling=False).coefficients
        return coefficients[3] if coefficients and coefficients[3] > _NOISE * coefficients[0] else 0.0

    def observe(self, verify_tokens: int, equal_length: bool, prefill_tokens: int, seconds: float) -> None:
        if not math.isfinite(seconds) or seconds < 0:
            return
        fit = self._prefilling if prefill_tokens else self._verifying
        fit.observe(self._features(verify_tokens, prefill_tokens, equal_length), seconds)
        if verify_tokens:
            self._recent.observe(seconds)
            self.typical = self._recent.value

    def predict(self, verify_tokens: float, equal_length: bool = True, prefill_tokens: float = 0.0) -> float:
        return self._fit(prefill_tokens > 0).predict(self._features(verify_tokens, prefill_tokens, equal_length))

    def _fit(self, prefilling: bool) -> CostFit:
        if prefilling:
            return _known(self._prefilling, self._verifying)
        return _known(self._verifying, self._prefilling)

    def _features(self, verify_tokens: float, prefill_tokens: float, equal_length: bool) -> Features:
        shared = self._shared
        ragged = 0.0 if equal_length else 1.0
        return (1.0, verify_tokens, prefill_tokens, ragged, shared, shared * verify_tokens, shared * prefill_tokens)


class DraftTimes:
    """Step seconds of one draft worker: so much a pass, a proposed token, and a token to catch up with.

    A step takes as many passes as its longest proposal has tokens. Steps that mostly catch up have a law of their own.
    `exclusive` means the same as in `TargetTimes`.
    """

    def __init__(self, initial_seconds: float, exclusive: DraftTimes | None = None) -> None:
        self._shared = 0.0 if exclusive is None else 1.0
        self._proposing: CostFit = CostFit(initial_seconds, _DRAFT_PRIOR) if exclusive is None else exclusive._proposing
        self._catching_up: CostFit = (
            CostFit(initial_seconds, _DRAFT_PRIOR) if exclusive is None else exclusive._catching_up
        )
        self._observed = 0

    @property
    def known(self) -> bool:
        return self._observed >= _ENOUGH

    @property
    def base(self) -> float:
        """Seconds of a pass without tokens."""
        return self.predict(1.0, 0.0)

    @property
    def per_token(self) -> float:
        """Seconds of one more proposed token; 0 before the first measurement."""
        coefficients = self._fit(catching_up=False).coefficients
        return 0.0 if coefficients is None else coefficients[1] + self._shared * coefficients[4]

    @property
    def per_catch_up_token(self) -> float:
        """Seconds of one more committed token whose KV was missing; 0 before the first measurement."""
        coefficients = self._fit(catching_up=True).coefficients
        return 0.0 if coefficients is None else coefficients[2] + self._shared * coefficients[5]

    def observe(self, passes: int, proposed_tokens: int, catch_up_tokens: int, seconds: float) -> None:
        self._observed += 1
        fit = self._catching_up if _mostly_catches_up(proposed_tokens, catch_up_tokens) else self._proposing
        fit.observe(self._features(passes, proposed_tokens, catch_up_tokens), seconds)

    def predict(self, passes: float, proposed_tokens: float, catch_up_tokens: float = 0.0) -> float:
        fit = self._fit(_mostly_catches_up(proposed_tokens, catch_up_tokens))
        return fit.predict(self._features(passes, proposed_tokens, catch_up_tokens))

    def _fit(self, catching_up: bool) -> CostFit:
        if catching_up:
            return _known(self._catching_up, self._proposing)
        return _known(self._proposing, self._catching_up)

    def _features(self, passes: float, proposed_tokens: float, catch_up_tokens: float) -> Features:
        shared = self._shared
        return (
            passes,
            proposed_tokens,
            catch_up_tokens,
            shared * passes,
            shared * proposed_tokens,
            shared * catch_up_tokens,
        )


def _mostly_catches_up(proposed_tokens: float, catch_up_tokens: float) -> bool:
    """More than the last rounds committed: up to two tokens for each proposed one."""
    return catch_up_tokens > 2 * proposed_tokens


def _known(law: CostFit, other: CostFit) -> CostFit:
    """`law`, or `other` as long as nothing was measured for `law`."""
    return other if law.coefficients is None else law


class Acceptance:
    """The chance that a token asked of a draft is proposed and taken by the target, given those before it were."""

    def __init__(self) -> None:
        self._taken = _PRIOR_ACCEPTANCE * _PRIOR_WEIGHT
        self._tried = _PRIOR_WEIGHT
        self.rate = _PRIOR_ACCEPTANCE

    def fade(self, share: float) -> None:
        """Lets what was seen count less, without changing the rate, but not so little that few tokens outweigh it."""
        if self._tried * share >= _MIN_TRIED:
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
        self._requested = self._proposed = _PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        return self._proposed / self._requested

    def observe(self, requested: int, proposed: int) -> None:
        self._requested = self._requested * _FORGET_ROUND + requested
        self._proposed = self._proposed * _FORGET_ROUND + proposed


def expected_commit(rate: float, draft_length: int) -> float:
    """Tokens a round is expected to commit: 1 + rate + rate**2 ... up to the draft length."""
    if rate >= 1:
        return draft_length + 1.0
    return float((1 - rate ** (draft_length + 1)) / (1 - rate))
