"""One sequence of the pool, and where it stands."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from scheduler.digests import DigestedTokens
from scheduler.messages import FinishReason, SequenceRequest

if TYPE_CHECKING:
    from scheduler.kv_moves import KvMove
    from scheduler.worker_book import DraftBook, TargetBook


class SequenceState(Enum):
    """WAITING -> PREFILLING -> READY -> DRAFTING -> DRAFTED -> VERIFYING -> READY ... -> one of the last three.

    Between two rounds, a sequence whose target drains may be MOVING.
    """

    WAITING = "waiting"
    PREFILLING = "prefilling"
    """The target lacks committed tokens; the row that feeds the last of them also chooses the next one."""
    READY = "ready"
    """Waits for a draft worker to propose."""
    DRAFTING = "drafting"
    DRAFTED = "drafted"
    """Waits for the target, with a proposal or, in a plain decoding round, without."""
    VERIFYING = "verifying"
    MOVING = "moving"
    """Its KV is on the way from one target to another; it has room on both."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Sequence:
    """Mutable record; its state changes only through scheduler/lifecycle.py, which keeps the indexes in step.

    `order` is the order of arrival: smaller is older. `length` changes only in PREFILLING and VERIFYING, so that
    indexes of the other states may use it as a key; at `end` the sequence has all the tokens it may get.

    Drafting: `wished_length` is what it is to draft in its present round; 0 says that its draft KV need not catch up.
    `asked_length` is what its draft was asked for in the round that waits for verification, `expected_tokens` what that
    round is expected to commit, `confidences` how sure the draft is of the tokens it proposed, whether or not all of
    them are worth verifying. `taken` and `tried` count its draft
    tokens, older ones less (draft_lengths.py), `plain_rounds` those since it last drafted; `probing` when it drafts
    only to see what that yields.
    """

    __slots__ = (
        "asked_length",
        "confidences",
        "draft",
        "draft_failures",
        "draft_tokens",
        "drafted_at",
        "drafted_order",
        "drafting_refused",
        "due",
        "end",
        "expected_tokens",
        "kv_move",
        "length",
        "order",
        "plain_rounds",
        "probing",
        "ready_at",
        "request",
        "sequence_id",
        "state",
        "taken",
        "target",
        "target_failures",
        "tokens",
        "tried",
        "wished_length",
    )

    def __init__(self, request: SequenceRequest, order: int) -> None:
        self.request = request
        self.sequence_id = request.sequence_id
        self.order = order
        self.tokens = DigestedTokens(request.prompt)
        self.tokens.extend(request.committed_output)
        self.length = len(self.tokens)
        self.end = len(request.prompt) + request.max_tokens
        self.state = SequenceState.WAITING
        self.target: TargetBook | None = None
        self.draft: DraftBook | None = None
        self.kv_move: KvMove | None = None
        self.draft_tokens: tuple[int, ...] = ()
        self.confidences = b""
        self.ready_at = 0.0
        self.drafted_at = 0.0
        self.drafted_order = 0
        self.due = 0.0
        self.target_failures = 0
        self.draft_failures = 0
        self.drafting_refused = False
        self.wished_length = 0
        self.asked_length = 0
        self.expected_tokens = 1.0
        self.taken = 0.0
        self.tried = 0.0
        self.plain_rounds = 0
        self.probing = False

    def commit(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Appends `tokens` up to the end of the sequence; returns what was appended, and why it ends if it does."""
        stop_token_ids, remaining = self.request.stop_token_ids, self.end - self.length
        reason = None
        if stop_token_ids:
            for index, token in enumerate(tokens[:remaining]):
                if token in stop_token_ids:
                    tokens, reason = tokens[: index + 1], FinishReason.STOP
                    break
        if reason is None and len(tokens) >= remaining:
            tokens, reason = tokens[:remaining], FinishReason.LENGTH
        self.tokens.extend(tokens)
        self.length += len(tokens)
        return tokens, reason


def already_ended(request: SequenceRequest) -> FinishReason | None:
    """Whether the output delivered before a resubmission was all of it."""
    if any(token in request.stop_token_ids for token in request.committed_output):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.committed_output) >= request.max_tokens else None
