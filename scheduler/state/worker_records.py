"""What the core writes down of a worker: the KV that it has of a sequence, and the steps sent to it."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.messages import Row


@dataclass(slots=True)
class KvEntry:
    """One sequence's KV on one worker: `valid` committed positions, then `ahead` positions of a pending proposal, with
    at least as many `pages` reserved as the worker really uses until it holds `room` positions.

    `opened` tells whether the worker got the sequence's parameters, with the first `known` tokens; then it may hold
    something to release.
    """

    valid: int = 0
    ahead: int = 0
    pages: int = 0
    room: int = 0
    opened: bool = False
    known: int = 0

    def settle_proposal(self, accepted: int) -> None:
        """The proposal was verified: its first `accepted` tokens are committed, the others are dropped.

        The last proposed token was never fed to the draft, hence the minimum: after full acceptance the draft's KV lags
        by that token and the bonus token.
        """
        self.valid += accepted if accepted < self.ahead else self.ahead
        self.ahead = 0

    def lose(self) -> None:
        """The worker does not know the sequence any more."""
        self.valid = self.ahead = 0
        self.opened = False


@dataclass(slots=True)
class Work:
    """What a step does: its passes, the tokens that it verifies or proposes, the other tokens that it feeds (prefill,
    or to catch up), and the tokens of KV that its passes read; of a target's own draft, passes and tokens proposed."""

    passes: int = 1
    decoded: int = 0
    fed: int = 0
    kv: int = 0
    own_passes: int = 0
    proposed: int = 0

    def propose(self, tokens: int) -> None:
        """A target's own draft proposes so many more."""
        self.proposed += tokens
        self.own_passes = max(self.own_passes, tokens)

    def leave_out(self, tokens: int) -> None:
        """So many tokens to feed needed no work."""
        self.fed = max(0, self.fed - tokens)


@dataclass(slots=True)
class Step:
    """A step that was sent and not answered. `sent_at` is None where the worker had another step then."""

    rows: tuple[Row, ...]
    work: Work
    sent_at: float | None
