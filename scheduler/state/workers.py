"""Sequences and workers, and which targets hold which sequences: the two ends of one relation, so all in one module."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from spool.scheduler.config import SchedulerConfig
from spool.scheduler.messages import (
    DraftGrant,
    FinishReason,
    PromptScoring,
    Row,
    SendStep,
    SequenceRequest,
    SequenceState,
    TokenLogprobs,
    WorkerSpec,
)
from spool.scheduler.page_counts import PageCounts
from spool.scheduler.speculation.acceptance import Acceptance
from spool.scheduler.speculation.goodput import TargetFigures
from spool.scheduler.state.digests import DigestedTokens
from spool.scheduler.state.key_accounts import KeyAccount
from spool.scheduler.state.prefixes import KnownPrefixes
from spool.scheduler.state.worker_records import KvEntry, Step, Work

# Looked up for every row: names are faster than attributes of the enumeration.
WAITING, PREFILLING, MOVING = SequenceState.WAITING, SequenceState.PREFILLING, SequenceState.MOVING
IDLE, VERIFYING, ENDED = SequenceState.IDLE, SequenceState.VERIFYING, SequenceState.ENDED

_NOTHING_TO_SCORE = sys.maxsize
"""A position behind all others."""


class Sequence:
    """All that the core knows of a live sequence.

    `order` is the order of arrival: smaller is older. `rank` (priority, then order) orders the sequences of a key.
    `length` counts committed tokens, and changes only in PREFILLING and VERIFYING. At length `end` the sequence has all
    tokens that it may get.
    """

    def __init__(self, request: SequenceRequest, order: int, account: KeyAccount) -> None:
        self.request, self.order, self.account = request, order, account
        self.sequence_id, self.rank = request.sequence_id, (request.priority, order)
        self.tokens = DigestedTokens(request.prompt)
        self.tokens.extend(request.committed_output)
        self.length, self.end = len(self.tokens), len(request.prompt) + request.max_tokens
        self.state = WAITING
        """Only `change_state`, the planner and `Lifecycle` change it, since the target's indexes must follow."""
        self.target: TargetWorker | None = None
        self.fingerprint = request.fingerprint
        """Of the target that computed the last that is known of the sequence; empty before there is anything, or where
        that is not known."""
        self.kv_move: KvMove | None = None
        """Set while the KV moves to another target, where the sequence is placed as well then."""

        # One round.
        self.verify = 0
        """Proposed tokens that the next row may verify: as many as the row before asked for."""
        self.drafted, self.looked_up = 0, False
        """Of these, those that it asked a draft for, and whether it asked for what lookup finds."""
        self.proposed_before = False
        """Whether a draft was asked for any that the last row might verify, and they were there in time."""
        self.due = 0.0
        """From which of the target's groups on an IDLE sequence must not be passed over any more."""

        # What the first output tells of the prompt.
        self.prompt_left = len(request.prompt)
        """Tokens of the prompt that no target has computed yet: those are served only once."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        scored = request.prompt_logprobs is not None and not request.committed_output and len(request.prompt) > 1
        self.score_from = 0 if scored else _NOTHING_TO_SCORE
        """Logits are still wanted from this position on, so that a target's KV counts as valid up to there at most."""
        self.cached = 0

        # Failures, and blame (scheduler/transitions/blame.py).
        self.target_failures = 0
        self.drafting_refused = False
        """Drafts were lost with the sequence, and are not asked for it any more."""
        self.suspected, self.suspicions = request.suspicion.tokens > 0, request.suspicion.count
        """The sequence had a row on a target that was lost. Its rows are alone in their steps."""
        self.suspected_until = self.length + request.suspicion.tokens
        """A suspect is cleared when its length reaches this."""

    @property
    def precedence(self) -> tuple[float, int, int]:
        """The one order in which sequences give way: where pages are short, those of the key that runs most for its
        weight lose theirs first, and of these the last in rank. It changes with what keys run."""
        return self.account.share, *self.rank

    def scoring(self, start: int, end: int) -> PromptScoring | None:
        """What the target is to tell of the prompt with a row that feeds the tokens [start, end): perhaps nothing yet,
        but where what it will be asked for begins, so that it takes over no KV beyond."""
        top = self.request.prompt_logprobs
        if top is None or self.score_from == _NOTHING_TO_SCORE:
            return None
        first = max(start, self.score_from) + 1
        return PromptScoring(first, self.request.prompt[first : end + 1], top)

    def take_scores(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Takes in the log probabilities that a row's `scoring` asked for."""
        self.prompt_logprobs.extend(logprobs)
        known = self.score_from + len(logprobs)
        self.score_from = known if known < len(self.request.prompt) - 1 else _NOTHING_TO_SCORE

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


@dataclass(slots=True, eq=False)
class KvMove:
    """One sequence's KV on its way between two targets.

    `abandoned` once the sequence no longer needs it: the destination keeps `pages` for it until the move is answered,
    and releases the KV that arrives.
    """

    move_id: int
    sequence: Sequence
    source: TargetWorker
    destination: TargetWorker
    positions: int
    abandoned: bool = False
    pages: int = 0


class TargetWorker:
    """A target worker: its KV and pages, the steps that it has not answered, and what its sequences wait for."""

    def __init__(self, spec: WorkerSpec, config: SchedulerConfig, acceptance: Acceptance | None = None) -> None:
        """`acceptance`: of the target's own draft, if it has one."""
        self.spec, self.worker_id, self.page_size = spec, spec.worker_id, spec.page_size
        half = max(1, spec.max_num_batched_tokens // 2)
        self.chunk = min(config.prefill_chunk or half, spec.max_num_batched_tokens)
        # A row feeds a chunk or verifies a proposal.
        ahead = self.chunk + spec.max_num_batched_tokens // 2
        counts = PageCounts(spec.page_spans or (spec.page_size,), spec.page_windows or (0,), ahead)
        self.pages_for = counts.pages_for
        self.capacity = counts.longest(spec.total_pages, spec.max_sequence_length)
        """Tokens of the longest sequence that fits when no other is placed here."""
        # Two rows always fit a step, so that verification cannot shut prefill out.
        self.longest_draft = max(0, spec.max_num_batched_tokens // 2 - 1)
        """The most proposed tokens that a row verifies."""
        self.figures = TargetFigures(config.initial_step_seconds, acceptance)
        self.draining = False
        """Whether the worker gets no new sequences, since it will leave."""
        self.changed = True
        """Whether anything here has changed since the worker was last asked for a step."""

        # What scheduler/transitions/assignment.py knows of it.
        self.draft: DraftWorker | None = None
        self.grant: DraftGrant | None = None
        self.granted_at = 0.0
        self.late_steps = 0
        """Steps in a row in which too few proposals were there in time."""

        self.free_pages = spec.total_pages
        self.pages_of_moves = 0
        """Reserved for KV that no sequence needs and that may still arrive."""
        self.prefixes = KnownPrefixes(spec.page_size, spec.total_pages)
        self.kv: dict[int, KvEntry] = {}
        self.releases: dict[int, None] = {}
        """Sequences whose KV the worker may free."""

        self.in_flight: dict[int, Row] = {}
        """The latest row of each sequence that has one in flight."""
        self.outstanding: dict[int, Step] = {}
        self.lone_step: int | None = None
        """The last step with a suspect's row, during which no other row may be in flight."""
        self.lone_step_was_last = False

        self.sequences: dict[int, Sequence] = {}
        """Those placed here: PREFILLING ones in the order of admission, IDLE ones by how long they have been so, the
        number of VERIFYING ones, and the `suspects` among the first two, which are in no other index."""
        self.prefilling: dict[int, Sequence] = {}
        self.idle: dict[int, Sequence] = {}
        self.verifying = 0
        self.suspects: dict[int, Sequence] = {}
        self.groups = 0
        """Verify groups that were sent."""
        self._config = config

    # --- KV and pages -------------------------------------------------------------------------------------------------

    def reserve(self, entry: KvEntry, positions: int) -> bool:
        """Grows the entry's pages to hold `positions` and returns True, or returns False if too few pages are free."""
        if positions <= entry.room:
            return True
        missing = self.pages_for(positions) - entry.pages
        if missing > self.free_pages:
            return False
        entry.pages += missing
        self.free_pages -= missing
        entry.room = -(-positions // self.page_size) * self.page_size
        return True

    def has_room(self, positions: int, leaving: int = 0, pages: int = 0) -> bool:
        """Whether a newcomer fits once `leaving` sequences with their `pages` have left. Some pages are kept back from
        newcomers, for the sequences here to grow into."""
        spare = -(-(len(self.sequences) - leaving) // 4)
        return positions <= self.capacity and self.pages_for(positions) + spare <= self.free_pages + pages

    def place(self, sequence: Sequence, positions: int) -> None:
        """Places the sequence here. `has_room` must have said yes; raises RuntimeError otherwise."""
        entry = KvEntry()
        if not self.reserve(entry, positions):
            raise RuntimeError(f"no pages for sequence {sequence.sequence_id} on worker {self.worker_id}")
        self.sequences[sequence.sequence_id] = sequence
        self.kv[sequence.sequence_id] = entry
        self.prefixes.add(sequence.request.cache_scope, sequence.tokens)

    def evict(self, sequence: Sequence) -> None:
        """Removes the sequence. What the worker holds of it is released with the next step."""
        sequence_id = sequence.sequence_id
        self.changed = True
        del self.sequences[sequence_id]
        entry = self.kv.pop(sequence_id)
        self.free_pages += entry.pages
        if entry.opened:
            self.releases[sequence_id] = None
        self.abandon_rows(sequence_id)

    def has_behind(self, sequence: Sequence) -> bool:
        """Whether any sequence here gives way to this one."""
        precedence = sequence.precedence
        return any(other.precedence > precedence for other in self.sequences.values())

    def last_resting(self, sequence: Sequence) -> Sequence | None:
        """The sequence that gives way first, of those here that give way to this one and have no row in flight."""
        last, precedence = None, sequence.precedence
        for sequence_id, other in self.sequences.items():
            if other.precedence > precedence and sequence_id not in self.in_flight:
                last, precedence = other, other.precedence
        return last

    # --- rows and steps -----------------------------------------------------------------------------------------------

    def abandon_rows(self, sequence_id: int) -> None:
        """Ignores the answers to all rows of the sequence that are in flight."""
        row = self.in_flight.get(sequence_id)
        while row is not None:
            row.abandoned = True
            row = row.before

    def row_answered(self, row: Row) -> None:
        """The row is no longer in flight. The row is abandoned if its answer came before the answer to the sequence's
        previous row: what the previous row fed is not known yet. So are rows that follow an abandoned one."""
        later, before = self.in_flight[row.sequence_id], row.before
        if before is not None:
            row.abandoned = True
        if later is not row:
            later.abandoned |= row.abandoned and later.follows
            while later.before is not None and later.before is not row:
                later = later.before
                later.abandoned |= row.abandoned and later.follows
            later.before = before
        elif before is not None:
            self.in_flight[row.sequence_id] = before
        else:
            del self.in_flight[row.sequence_id]

    def make_row(
        self,
        sequence: Sequence,
        entry: KvEntry,
        start: int,
        end: int,
        verify: int = 0,
        draft_length: int = 0,
        sample: bool = False,
    ) -> Row:
        """A row that feeds committed tokens from `start` to `end`, at least one. It is in flight, and must be sent."""
        sequence_id, tokens = sequence.sequence_id, sequence.tokens
        if start >= end:
            start = end - 1
        row = self.in_flight[sequence_id] = Row(
            sequence_id,
            start,
            tokens.digests[start],
            tuple(tokens.tokens[start:end]),
            end,
            verify,
            draft_length,
            sample,
            self.in_flight.get(sequence_id),
        )
        if not entry.opened:
            entry.opened = True
            row.opening = sequence.request
            row.committed = tuple(tokens.tokens[: entry.room])
            entry.known = len(row.committed)
        if end <= entry.known:
            row.known = True
        return row

    def send(
        self, step_id: int, rows: Items[Row], work: Work, forced: bool = False, wait_seconds: float = 0.0
    ) -> SendStep:
        """Records a step with these rows and all pending releases as sent; returns the command for it."""
        self.changed = True
        self.groups += work.decoded > 0
        released, rows, grant = tuple(self.releases), tuple(rows), self.grant
        self.releases.clear()
        self.outstanding[step_id] = Step(rows, work, grant)
        return SendStep(self.worker_id, step_id, rows, released, work.decoded, forced, grant, wait_seconds)

    def may_ask(self, draft_id: str) -> bool:
        """Whether a step that is not answered yet lets the target ask this draft worker."""
        grants = (step.grant for step in self.outstanding.values())
        return any(grant is not None and grant.draft_id == draft_id for grant in grants)

    # --- who waits for what -------------------------------------------------------------------------------------------

    def index(self, sequence: Sequence, state: SequenceState, by: int) -> None:
        """A sequence here has got into this state (`by` 1), or has left it (-1)."""
        self.changed = True
        if state is VERIFYING:
            self.verifying += by
        elif state is IDLE or state is PREFILLING:
            waiting = self.idle if state is IDLE else self.prefilling
            if by > 0:
                (self.suspects if sequence.suspected else waiting)[sequence.sequence_id] = sequence
            elif self.suspects.pop(sequence.sequence_id, None) is None:
                del waiting[sequence.sequence_id]

    def due(self) -> float:
        """From which group on a sequence that is IDLE from now on must not be passed over any more: the wait bound,
        counted from its place among the others. Those before it fill groups in any case."""
        return self.groups + self._config.wait_bound_steps + len(self.idle) // self._config.batch_size

    def next_suspect(self) -> Sequence | None:
        """The suspect that came first of those that have no row in flight."""
        idle = (one for sequence_id, one in self.suspects.items() if sequence_id not in self.in_flight)
        return min(idle, key=lambda sequence: sequence.order, default=None)

    def can_follow(self) -> list[Sequence]:
        """The sequences with a row in the step that was sent last, after which the worker knows what to feed next: the
        row feeds all committed tokens, and samples one."""
        last = next(reversed(self.outstanding.values()), None)
        return [
            sequence
            for row in (last.rows if last is not None else ())
            if row.sample and not row.abandoned
            for sequence in (self.sequences[row.sequence_id],)
            if row.end == sequence.length and not sequence.suspected
        ]

    def prefill_from(self, sequence: Sequence) -> int | None:
        """The position from which the next chunk of a PREFILLING sequence feeds; None where the sequence must wait for
        an answer.

        A chunk may follow another one that is in flight. Where the worker has more of the prompt from others, which it
        says in its answers, a chunk that was sent before costs it nothing, and the next goes on behind that.
        """
        valid, row = self.kv[sequence.sequence_id].valid, self.in_flight.get(sequence.sequence_id)
        if row is None:
            return valid
        if row.abandoned or row.sample or sequence.suspected:
            return None
        return max(valid, row.end)


@dataclass(slots=True, eq=False)
class DraftWorker:
    """A draft worker, and the targets that it serves: they ask it for proposals themselves. `acceptance` is that of its
    model. One that is `draining` gets no other targets, since it will leave."""

    worker_id: str
    acceptance: Acceptance
    draining: bool = False
    targets: dict[str, TargetWorker] = field(default_factory=dict)

    @property
    def load(self) -> int:
        """In running sequences, and one for each target: that may get some."""
        return sum(1 + len(target.sequences) for target in self.targets.values())


def change_state(sequence: Sequence, state: SequenceState) -> None:
    """Changes the state, and with it the sequence's place in the indexes of its target."""
    before, target = sequence.state, sequence.target
    sequence.state = state
    if target is not None:
        target.index(sequence, before, -1)
        target.index(sequence, state, 1)


def already_ended(request: SequenceRequest) -> FinishReason | None:
    """Why a resubmitted request has nothing left to generate; None if it has."""
    if any(token in request.stop_token_ids for token in request.committed_output):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.committed_output) >= request.max_tokens else None
