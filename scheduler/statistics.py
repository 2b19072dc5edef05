"""Counters of the core, and the snapshot that progress displays read."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.messages import GroupFormed, Role
from scheduler.sequence import SequenceState


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    groups: int = 0
    grouped_rows: int = 0
    equal_groups: int = 0
    equal_rows: int = 0
    forced_groups: int = 0
    rounds: int = 0
    emitted_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    probes: int = 0
    moves: int = 0
    moved_positions: int = 0
    moved_bytes: int = 0
    move_seconds: float = 0.0
    failed_moves: int = 0
    rehomed: int = 0
    draft_lengths: dict[int, int] = field(default_factory=dict)

    def count_move(self, positions: int, size: int, seconds: float) -> None:
        self.moves += 1
        self.moved_positions += positions
        self.moved_bytes += size
        self.move_seconds += seconds

    def count_step(self, group: GroupFormed | None) -> None:
        self.steps += 1
        if group is None:
            return
        self.groups += 1
        self.grouped_rows += group.rows
        self.forced_groups += group.forced_by_bound
        if group.equal_length and group.rows > 1:
            self.equal_groups += 1
            self.equal_rows += group.rows

    def count_round(self, emitted: int, drafted: int, accepted: int) -> None:
        self.rounds += 1
        self.emitted_tokens += emitted
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted

    def count_draft_length(self, asked: int) -> None:
        self.draft_lengths[asked] = self.draft_lengths.get(asked, 0) + 1


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Verify groups since the start. Equal groups are those of at least two rows of one length."""

    groups: int
    rows: int
    equal_groups: int
    equal_rows: int
    forced_groups: int

    @property
    def mean_rows(self) -> float:
        return self.rows / self.groups if self.groups else 0.0


@dataclass(frozen=True, slots=True)
class MoveStatistics:
    """Sequences that left a draining target, since the start: `moves` with so many `positions`, `bytes` and `seconds`
    of KV; `failed` ones, and those `rehomed` without their KV because that was sooner."""

    moves: int
    positions: int
    bytes: int
    seconds: float
    failed: int
    rehomed: int


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """`base_seconds` and `row_seconds` are the measured law of its steps: a target's takes base + row · rows to verify,
    a draft's that much for every pass."""

    worker_id: str
    role: Role
    sequences: int
    free_pages: int
    total_pages: int
    steps_in_flight: int
    base_seconds: float
    row_seconds: float


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """`length` counts committed tokens, those of the prompt among them; no target for a sequence that waits."""

    sequence_id: int
    length: int
    prompt_length: int
    state: SequenceState
    target_id: str | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The core at one moment. `pool` counts all live sequences: those `waiting` and those in the `window`.

    `prefilling`, `drafting` (ready or being proposed for), `drafted`, `verifying` and `moving` add up to `window`.
    `acceptance` is the measured chance that a token asked of a draft is proposed and taken, given those before it were.
    `draft_lengths` counts
    verified rounds by the tokens asked of a draft, 0 for plain ones; `probes` are drafts only to see what they yield.
    """

    waiting: int
    window: int
    pool: int
    prefilling: int
    drafting: int
    drafted: int
    verifying: int
    moving: int
    acceptance: float
    rounds: int
    emitted_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    steps: int
    probes: int
    draft_lengths: dict[int, int]
    groups: GroupStatistics
    moves: MoveStatistics
    workers: tuple[WorkerSnapshot, ...]

    @property
    def plain_rounds(self) -> int:
        return self.draft_lengths.get(0, 0)
