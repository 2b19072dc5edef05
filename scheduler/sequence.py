"""One sequence of the pool, and where it stands."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from scheduler.digests import DigestedTokens
from scheduler.messages import FinishReason, SequenceRequest

if TYPE_CHECKING:
    from scheduler.worker_book import DraftBook, TargetBook


class SequenceState(Enum):
    """WAITING -> PREFILLING -> READY -> DRAFTING -> DRAFTED -> VERIFYING -> READY ... -> one of the last three."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    """The target lacks committed tokens; the row that feeds the last of them also chooses the next one."""
    READY = "ready"
    """Waits for a draft worker to propose."""
    DRAFTING = "drafting"
    DRAFTED = "drafted"
    """Waits for the target, with a proposal or, in a plain decoding round, without."""
    VERIFYING = "verifying"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Sequence:
    """Mutable record; its state changes only through scheduler/lifecycle.py, which keeps the indexes in step.

    `order` is the order of arrival: smaller is older. `length` changes only in PREFILLING and VERIFYING, so that
    indexes of the other states may use it as a key.
    """

    __slots__ = (
        "draft",
        "draft_failures",
        "draft_tokens",
        "drafted_at",
        "drafted_order",
        "drafting_refused",
        "due",
        "order",
        "request",
        "sequence_id",
        "state",
        "target",
        "target_failures",
        "tokens",
    )

    def __init__(self, request: SequenceRequest, order: int) -> None:
        self.request = request
        self.sequence_id = request.sequence_id
        self.order = order
        self.tokens = DigestedTokens(request.prompt)
        self.tokens.extend(request.committed_output)
        self.state = SequenceState.WAITING
        self.target: TargetBook | None = None
        self.draft: DraftBook | None = None
        self.draft_tokens: tuple[int, ...] = ()
        self.drafted_at = 0.0
        self.drafted_order = 0
        self.due = 0.0
        self.target_failures = 0
        self.draft_failures = 0
        self.drafting_refused = False

    @property
    def length(self) -> int:
        return len(self.tokens.tokens)

    @property
    def remaining(self) -> int:
        """Output tokens that may still be committed."""
        request = self.request
        return len(request.prompt) + request.max_tokens - len(self.tokens.tokens)

    def commit(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Appends `tokens` up to the end of the sequence; returns what was appended, and why it ends if it does."""
        request = self.request
        reason = None
        if request.stop_token_ids:
            for index, token in enumerate(tokens[: self.remaining]):
                if token in request.stop_token_ids:
                    tokens, reason = tokens[: index + 1], FinishReason.STOP
                    break
        if reason is None and len(tokens) >= self.remaining:
            tokens, reason = tokens[: self.remaining], FinishReason.LENGTH
        self.tokens.extend(tokens)
        return tokens, reason


def already_ended(request: SequenceRequest) -> FinishReason | None:
    """Whether the output delivered before a resubmission was all of it."""
    if any(token in request.stop_token_ids for token in request.committed_output):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.committed_output) >= request.max_tokens else None
