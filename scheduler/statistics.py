"""What only the core can count, and the snapshot that status and metrics read.

What shows in its commands and in answers of workers (steps, groups, tokens) is counted by whoever carries them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spool.scheduler.messages import Role, SequenceState


@dataclass(slots=True)
class MoveStatistics:
    """Sequences that left a draining target, since the start. `moves` is the number of those that took their KV along,
    which had `positions` and `bytes` in all and took `seconds`; `failed` counts moves that failed, and `rehomed`
    sequences that left their KV behind because computing it was faster."""

    moves: int = 0
    positions: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failed: int = 0
    rehomed: int = 0


@dataclass(slots=True)
class Counters:
    """Totals since the start.

    `draft_lengths` counts rounds (answers of targets to sequences that they verified) by the tokens asked of a draft, 0
    for plain ones; `probes` are drafts only to see what they yield. Of verify groups of two rows at least,
    `equal_length_groups` counts those whose rows ended at one position with one number of verified tokens, and
    `ragged_groups` the others, with `ragged_rows` in all.
    """

    preemptions: int = 0
    probes: int = 0
    equal_length_groups: int = 0
    ragged_groups: int = 0
    ragged_rows: int = 0
    moves: MoveStatistics = field(default_factory=MoveStatistics)
    draft_lengths: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A draft's `sequences` are those of the targets that it serves; of its pages and steps the core knows nothing, and
    the fields are 0."""

    worker_id: str
    role: Role
    sequences: int
    free_pages: int
    total_pages: int
    steps_in_flight: int


@dataclass(frozen=True, slots=True)
class DraftingSnapshot:
    """What one target's sequences draft with one draft worker at present, and why; only policy AUTO decides that.

    At up to `length` tokens a round they are expected to commit `tokens_per_second`, `gain` times as many as by plain
    decoding. `chances`: that a token is accepted, given that those before it were, by its place. `lookup_length` and
    `lookup_chances` are those of what lookup finds, as it does in the `lookup_share` of the rounds; without chances, it
    has found nothing yet.
    """

    target_id: str
    draft_id: str
    length: int
    gain: float
    tokens_per_second: float
    chances: tuple[float, ...]
    lookup_share: float = 0.0
    lookup_length: int = 0
    lookup_chances: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class KeySnapshot:
    """One API key by its name, "" for all requests without one of the configured names.

    Since the start: `prompt_tokens` computed, `output_tokens` committed, and `refusals` by the name of the
    limit (`LIMITS` of scheduler/transitions/admission_limits.py) that refused.
    """

    name: str
    running: int
    waiting: int
    prompt_tokens: int
    output_tokens: int
    refusals: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """`length` counts committed tokens, those of the prompt among them; no target for a sequence that waits."""

    sequence_id: int
    length: int
    prompt_length: int
    state: SequenceState
    target_id: str | None


@dataclass(slots=True, kw_only=True)
class Snapshot(Counters):
    """The core at one moment, and its counters. `live` counts all unfinished sequences: those `waiting` and those
    `running`, of which there may be `max_running`, or more for a while after a target began to leave.

    `prefilling`, `idle`, `verifying` and `moving` add up to `running`.
    """

    waiting: int
    running: int
    max_running: int
    live: int
    prefilling: int
    idle: int
    verifying: int
    moving: int
    workers: tuple[WorkerSnapshot, ...]
    keys: tuple[KeySnapshot, ...]
    drafting_now: tuple[DraftingSnapshot, ...]
