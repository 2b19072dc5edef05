"""What the core writes down of a target: the KV that it has of a sequence, and the steps sent to it."""

from __future__ import annotations

from dataclasses import dataclass

from spool.scheduler.messages import DraftGrant, Row


@dataclass(slots=True)
class KvEntry:
    """One sequence's KV on one target: `valid` committed positions, with at least as many `pages` reserved as the
    worker really uses until it holds `room` positions.

    `opened` tells whether the worker got the sequence's parameters, with the first `known` tokens; then it may hold
    something to release.
    """

    valid: int = 0
    pages: int = 0
    room: int = 0
    opened: bool = False
    known: int = 0

    def lose(self) -> None:
        """The worker does not know the sequence any more."""
        self.valid = 0
        self.opened = False


@dataclass(slots=True)
class Work:
    """What a step does: the tokens that it decodes or verifies, the other tokens that it feeds, and the tokens of KV
    that its pass reads. `proposed` counts the tokens that it may verify, `drafted` those that a draft was asked for,
    and `longest` those of the row with most: the passes of the draft. For `starting` of these sequences nothing was
    asked the round before."""

    decoded: int = 0
    fed: int = 0
    kv: int = 0
    proposed: int = 0
    drafted: int = 0
    longest: int = 0
    starting: int = 0

    def add(self, verify: int, drafted: int, kv: int) -> None:
        """A row that decodes a token, verifies up to `verify` proposed ones, of which a draft was asked for `drafted`,
        and reads `kv` tokens of KV."""
        self.decoded += 1
        self.kv += kv
        self.proposed += verify
        if drafted:
            self.drafted += drafted
            self.longest = max(self.longest, drafted)


@dataclass(slots=True)
class Step:
    """A step that was sent and not answered."""

    rows: tuple[Row, ...]
    work: Work
    grant: DraftGrant | None
