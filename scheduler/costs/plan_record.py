"""Compares the tokens that plans promised with those committed, separately for plain and speculative plans."""

from __future__ import annotations

from collections import deque

from scheduler.costs.draft_plan import DraftPlan

_REMEMBERED = 5
_MIN_TOKENS = 64
_MIN_TOKENS_EACH = 16
_FORGIVE_EVERY = 8
_MIN_TRUST = 0.5


class PlanRecord:
    """The share of promised tokens that one target committed, for each of its last stretches of work under one kind of
    plan.

    Only steady stretches count: the same number of sequences, nothing to prefill. Where the plan's model leaves costs
    out or is too optimistic (the best of many guesses looks too good), the share is low, and the promises of
    speculation count less.
    """

    def __init__(self) -> None:
        self._shares: dict[bool, deque[float]] = {kind: deque(maxlen=_REMEMBERED) for kind in (False, True)}
        self._plan: DraftPlan | None = None
        self._since = 0.0
        self._sequences = 0
        self._tokens_before = 0
        self._expected = self._counted = 0.0
        self._settling = False
        self._plain_stretches = 0

    @property
    def trust(self) -> float:
        """What speculation's promised rate is worth compared with plain decoding's: at most 1."""
        return min(1.0, max(_MIN_TRUST, self._median(True) / self._median(False)))

    def planned(self, plan: DraftPlan, now: float, sequences: int, tokens: int, steady: bool) -> None:
        """A plan takes over; the target has sampled `tokens` since its start."""
        before = self._plan
        same_kind = before is not None and bool(before.thresholds) == bool(plan.thresholds)
        if before is not None and steady and sequences == self._sequences:
            self._expected += before.rate * (now - self._since)
            self._counted += tokens - self._tokens_before
            if same_kind and self._expected >= max(_MIN_TOKENS, _MIN_TOKENS_EACH * sequences):
                if not self._settling:
                    self._note(bool(before.thresholds), self._counted / self._expected)
                self._settling = False
                self._expected = self._counted = 0.0
        if not same_kind:
            # Drafts catch up first, and the plan is not to blame for that.
            self._settling = True
        if not same_kind or not steady or sequences != self._sequences:
            self._expected = self._counted = 0.0
        self._plan, self._since, self._sequences, self._tokens_before = plan, now, sequences, tokens

    def forgive(self, seconds: float) -> None:
        """A step took so many seconds longer than expected, for which no plan is to blame."""
        self._since += seconds

    def _note(self, speculating: bool, share: float) -> None:
        self._shares[speculating].append(share)
        if not speculating:
            # Speculation that kept little of its promise gets another chance now and then.
            self._plain_stretches += 1
            if self._plain_stretches % _FORGIVE_EVERY == 0:
                self._shares[True].append(1.0)

    def _median(self, speculating: bool) -> float:
        shares = sorted(self._shares[speculating])
        return shares[len(shares) // 2] if len(shares) > 1 else 1.0
