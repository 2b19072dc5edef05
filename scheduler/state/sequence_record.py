"""One live sequence: its tokens, its state, and the numbers of its rounds. workers.py adds the workers that hold it."""

from __future__ import annotations

import sys
from enum import Enum

from scheduler.messages import FinishReason, Outcome, PromptScoring, SequenceRequest, TokenLogprobs
from scheduler.state.digests import DigestedTokens
from scheduler.state.key_accounts import KeyAccount

NOTHING_TO_SCORE = sys.maxsize
"""A position behind all others."""


class SequenceState(Enum):
    """Where a sequence stands. scheduler/transitions/table.py lists the legal changes."""

    # Members are looked up for every row: the hash of an enumeration's member is a call, that of an object is not.
    __hash__ = object.__hash__

    WAITING = "waiting"
    """Has no target and no KV yet, or has lost both."""
    PREFILLING = "prefilling"
    """The target's KV lags behind the committed tokens. The row that feeds the last of them samples the next token."""
    READY = "ready"
    """Waits for a draft worker to propose."""
    DRAFTING = "drafting"
    DRAFTED = "drafted"
    """Waits for the target, with a proposal or, in a plain decoding round, without."""
    VERIFYING = "verifying"
    MOVING = "moving"
    """The sequence's KV is on the way from one target to another. Both have pages for it."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class SequenceRecord:
    """All that the core knows of a sequence, except which workers hold it: `workers.Sequence` adds those.

    Only scheduler/transitions/lifecycle.py changes `state`, since the workers' indexes must follow.

    `order` is the order of arrival: smaller is older. `rank` (priority, then order) is the one order in which sequences
    give way: where room is short, those of the highest rank lose theirs first. `account` is that of the sequence's key,
    and `prompt_left` counts the tokens of the prompt that no target has computed yet: those are served only once.

    `length` counts committed tokens. The length changes only in
    PREFILLING and VERIFYING, so indexes of the other states may use it as a key. At length `end` the sequence has all
    tokens that it may get.

    One round: `planned_draft_length` is the number of tokens to draft in the present round, `requested_draft_length`
    the number that the draft was asked for in the round that waits for verification. `confidences` holds the draft's
    confidence in each token that it proposed, whether or not the token is worth verifying. `wants_draft_kv` tells
    whether a draft worker should keep its KV of the sequence up to date; without it the draft's KV may lag behind.
    `outcomes` are those of the verification under way that the draft has prepared for: it is asked to at most once at
    each length, the last time at `prepared_for`.

    What the first output tells of the prompt: `prompt_logprobs` of its tokens as far as they are known, where they are
    asked for, and how many of its tokens were `cached`. Logits are still wanted from position `score_from` on, so that
    a target's KV counts as valid up to there at most.

    Blame (scheduler/transitions/blame.py): a `suspected` sequence had a row on a target that was lost. Its rows are
    alone in their steps until its length passes `suspected_until`; `suspicions` counts how often that has happened.
    `draft_losses` counts draft workers that were lost with a row of the sequence. It is drafted for no more if that
    happens again while it has `proposals_owed`; each proposal is one less.
    """

    __slots__ = (
        "account",
        "cached",
        "confidences",
        "draft_failures",
        "draft_losses",
        "draft_tokens",
        "drafted_at",
        "drafting_refused",
        "due",
        "end",
        "length",
        "order",
        "outcomes",
        "planned_draft_length",
        "prepared_for",
        "prompt_left",
        "prompt_logprobs",
        "proposals_owed",
        "rank",
        "ready_at",
        "request",
        "requested_draft_length",
        "score_from",
        "sequence_id",
        "state",
        "suspected",
        "suspected_until",
        "suspicions",
        "target_failures",
        "tokens",
        "wants_draft_kv",
    )

    def __init__(self, request: SequenceRequest, order: int, account: KeyAccount) -> None:
        self.request = request
        self.sequence_id = request.sequence_id
        self.order = order
        self.rank = (request.priority, order)
        self.account = account
        self.prompt_left = len(request.prompt)
        self.prompt_logprobs: list[TokenLogprobs] = []
        wants_scores = request.prompt_logprobs is not None and not request.committed_output
        self.score_from = 0 if wants_scores and len(request.prompt) > 1 else NOTHING_TO_SCORE
        self.cached = 0
        self.tokens = DigestedTokens(request.prompt)
        self.tokens.extend(request.committed_output)
        self.length = len(self.tokens)
        self.end = len(request.prompt) + request.max_tokens
        self.state = SequenceState.WAITING
        self.draft_tokens: tuple[int, ...] = ()
        self.confidences = b""
        self.outcomes: tuple[Outcome, ...] = ()
        self.prepared_for = 0
        self.ready_at = 0.0
        self.drafted_at = 0.0
        self.due = 0.0
        self.target_failures = 0
        self.draft_failures = 0
        self.drafting_refused = False
        self.suspected = request.suspicion.tokens > 0
        self.suspected_until = self.length + request.suspicion.tokens
        self.suspicions = request.suspicion.count
        self.draft_losses = 0
        self.proposals_owed = 0
        self.wants_draft_kv = False
        self.planned_draft_length = 0
        self.requested_draft_length = 0

    def scoring(self, start: int, end: int) -> PromptScoring | None:
        """What the target is to tell of the prompt with a row that feeds the tokens [start, end)."""
        top = self.request.prompt_logprobs
        if top is None:
            return None
        first = max(start, self.score_from) + 1
        tokens = self.request.prompt[first : end + 1]
        return PromptScoring(first, tokens, top) if tokens else None

    def take_scores(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Takes in the log probabilities that a row's `scoring` asked for."""
        self.prompt_logprobs.extend(logprobs)
        known = self.score_from + len(logprobs)
        self.score_from = known if known < len(self.request.prompt) - 1 else NOTHING_TO_SCORE

    def prepared(self, accepted: int, token: int) -> Outcome | None:
        """What the draft has prepared for this outcome of the verification, which is over now."""
        outcomes, self.outcomes = self.outcomes, ()
        return next((one for one in outcomes if one.accepted == accepted and one.token == token), None)

    def commit(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Appends `tokens` up to the end of the sequence. Returns what was appended, and why it ends if it does."""
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
    """Why a resubmitted request has nothing left to generate; None if it has."""
    if any(token in request.stop_token_ids for token in request.committed_output):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.committed_output) >= request.max_tokens else None
