"""What a worker holds of each sequence: positions with valid KV, and the pages reserved for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class KvEntry:
    """One sequence's KV on one worker: `valid` committed positions, then `ahead` positions of a pending proposal.

    `opened` tells whether the worker got the sequence's parameters; then it may hold something to release.
    """

    valid: int = 0
    ahead: int = 0
    opened: bool = False
    known: int = 0
    """How many committed tokens came with the parameters."""

    def settle_proposal(self, accepted: int) -> None:
        """The proposal was verified: its first `accepted` tokens are committed, the others are dropped.

        The last proposed token was never fed to the draft, hence the minimum: after full acceptance the draft's KV lags
        by that token and the bonus token.
        """
        self.valid += accepted if accepted < self.ahead else self.ahead
        self.ahead = 0

    def reset(self) -> None:
        self.valid = self.ahead = 0


class PageLedger:
    """Pages reserved on one worker, by sequence: at least as many as the worker really uses."""

    def __init__(self, total_pages: int, page_size: int) -> None:
        self.total_pages = total_pages
        self.page_size = page_size
        self.free_pages = total_pages
        self._reserved: dict[int, int] = {}

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def reserved(self, sequence_id: int) -> int:
        return self._reserved.get(sequence_id, 0)

    def reserve(self, sequence_id: int, positions: int, spare: int = 0) -> bool:
        """Grows the sequence's pages to hold `positions`, if `spare` pages stay free; else changes nothing: False."""
        held = self._reserved.get(sequence_id, 0)
        missing = -(-positions // self.page_size) - held
        if missing <= 0:
            return True
        if missing + spare > self.free_pages:
            return False
        self._reserved[sequence_id] = held + missing
        self.free_pages -= missing
        return True

    def release(self, sequence_id: int) -> None:
        self.free_pages += self._reserved.pop(sequence_id, 0)

    def check_integrity(self) -> None:
        """Raises RuntimeError when reserved and free pages do not add up."""
        held = sum(self._reserved.values())
        if held + self.free_pages != self.total_pages or self.free_pages < 0:
            raise RuntimeError(f"{held} pages reserved and {self.free_pages} free of {self.total_pages}")
