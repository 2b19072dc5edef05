"""The legal changes of a sequence's state: (state, cause) -> state.

`Lifecycle` is the only reader, and every change passes through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from scheduler.state.sequence_record import SequenceState

WAITING, PREFILLING = SequenceState.WAITING, SequenceState.PREFILLING
READY, DRAFTING = SequenceState.READY, SequenceState.DRAFTING
DRAFTED, VERIFYING = SequenceState.DRAFTED, SequenceState.VERIFYING
MOVING = SequenceState.MOVING
FINISHED, FAILED, CANCELLED = SequenceState.FINISHED, SequenceState.FAILED, SequenceState.CANCELLED


class Cause(Enum):
    """Why a sequence changes its state."""

    __hash__ = object.__hash__

    ADMITTED = "admitted"
    """A target had room for the sequence."""
    KV_MISSING = "KV missing"
    """The target must feed committed tokens first: it lost KV, or another target takes over without it."""
    DRAFT_WANTED = "draft wanted"
    """A round begins in which a draft worker is to propose."""
    DRAFT_SENT = "draft sent"
    """The step in which the draft proposes was sent."""
    PROPOSED = "proposed"
    """The proposal came."""
    PREPARED = "prepared"
    """A round begins for which the draft has prepared a proposal."""
    DRAFT_SKIPPED = "draft skipped"
    """The round goes on without a proposal."""
    VERIFY_SENT = "verify sent"
    """The step in which the target verifies was sent."""
    FOLLOWED = "followed"
    """The first token has come, and the row of the next round, a plain one, was sent before."""
    KV_LEAVES = "KV leaves"
    """The target drains, and the KV is sent to another one."""
    RETURNED = "returned"
    """The sequence gave its pages to another one, or its target is gone."""
    ENDED = "ended"
    """A stop token, or `max_tokens`."""
    CANCEL = "cancel"
    """The client gave the sequence up."""
    ERROR = "error"
    """No target can run the sequence."""


_NEXT_ROUND = {
    Cause.DRAFT_WANTED: READY,
    Cause.DRAFT_SKIPPED: DRAFTED,
    Cause.KV_MISSING: PREFILLING,
    Cause.KV_LEAVES: MOVING,
}
_OUT = {Cause.RETURNED: WAITING, Cause.CANCEL: CANCELLED}
_RESULT = {Cause.ENDED: FINISHED, Cause.ERROR: FAILED}

TRANSITIONS: Mapping[SequenceState, Mapping[Cause, SequenceState]] = {
    WAITING: {Cause.ADMITTED: PREFILLING, Cause.CANCEL: CANCELLED, Cause.ERROR: FAILED},
    PREFILLING: {Cause.FOLLOWED: VERIFYING, **_NEXT_ROUND, **_RESULT, **_OUT},
    READY: {Cause.DRAFT_SENT: DRAFTING, **_NEXT_ROUND, **_OUT},
    DRAFTING: {Cause.PROPOSED: DRAFTED, **_NEXT_ROUND, **_OUT},
    DRAFTED: {Cause.VERIFY_SENT: VERIFYING, **_OUT},
    VERIFYING: {Cause.PREPARED: DRAFTED, **_NEXT_ROUND, **_RESULT, **_OUT},
    MOVING: {**_NEXT_ROUND, **_OUT},
    FINISHED: {},
    FAILED: {},
    CANCELLED: {},
}


class IllegalTransitionError(RuntimeError):
    """A change that the table does not have: a mistake in the core."""
