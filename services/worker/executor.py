"""Runs the steps of one worker: turns rows of the protocol into rows of the engine, and their outcomes into replies.

Not thread-safe: `execute` is called from one thread. Other threads may read `sequences` and `free_pages`, which are
plain lengths.
"""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from engine.description import EngineDescription
from engine.errors import DeviceLostError, one_line
from engine.kv.kv_store import KvStore
from engine.kv.pages import PagePool
from engine.steps import (
    AheadProposal,
    AheadRow,
    Awaited,
    Computing,
    EngineTimings,
    ProposeRow,
    RowOutcome,
    StepOutcome,
    VerifyRow,
    never_awaited,
    no_callback,
)
from protos import worker_pb2
from scheduler.messages import PromptScoring, Role, RowStatus
from scheduler.state.digests import EMPTY_DIGEST
from services.rpc.conversion import from_wire, to_wire
from services.rpc.followed_rows import Followed, followed_to_wire
from services.rpc.worker_codec import ROLES, ROW_STATUSES, logprobs_to_wire
from services.worker.kv_pages import KvTransfer, WrongEpochError
from services.worker.sequences import PreparedRow, RowRejectedError, WorkerSequences

logger = logging.getLogger(__name__)

_CACHED_REPLIES = 16

_DRAINING = "the worker is draining and takes no new sequences"

Running = Sequence[tuple[PreparedRow, worker_pb2.Row | None]]
"""Rows of a step that can run. Those without a message of their own follow another row."""


class Engine(Protocol):
    """What a worker needs of an engine. Rows fail singly, through `RowOutcome.error`."""

    @property
    def description(self) -> EngineDescription: ...

    @property
    def pool(self) -> PagePool: ...

    @property
    def device_lost(self) -> bool:
        """Whether every later step must fail, too. Asked after a step that failed as a whole."""
        ...


class VerifyingEngine(Engine, Protocol):
    def step(self, rows: Sequence[VerifyRow], computing: Computing) -> StepOutcome: ...


class DraftingEngine(Engine, Protocol):
    def step(self, rows: Sequence[ProposeRow], computing: Computing) -> StepOutcome: ...

    def prepare(self, rows: Sequence[AheadRow], computing: Computing, awaited: Awaited) -> StepOutcome: ...


SomeEngine = TypeVar("SomeEngine", bound=Engine)


class StepExecutor(ABC, Generic[SomeEngine]):
    """Executes one step at a time for one engine, and keeps the last replies so that a repeated step is safe.

    `worker_epoch` must differ between two starts of a worker. `clock` is a monotonic clock in seconds. Without a
    `kv_store`, the worker neither gives KV to other workers nor takes KV from them. `awaited` is set by whoever queues
    steps.
    """

    role: Role
    awaited: Awaited

    def __init__(
        self,
        engine: SomeEngine,
        worker_epoch: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        kv_store: KvStore | None = None,
        prefix_cache: bool = True,
    ) -> None:
        self.engine = engine
        self.awaited = never_awaited
        self._clock = clock
        self.worker_epoch = time.time_ns() if worker_epoch is None else worker_epoch
        description = engine.description
        self._sequences = WorkerSequences(engine.pool, self.role, description, prefix_cache)
        self.kv_transfer = KvTransfer(self._sequences, kv_store, self.check_epochs)
        self._scheduler_epoch = 0
        self._last_step_id = -1
        self._replies: OrderedDict[int, worker_pb2.StepReply] = OrderedDict()
        self._ended: float | None = None
        self.draining = False

    @property
    def sequences(self) -> int:
        return len(self._sequences)

    @property
    def free_pages(self) -> int:
        return self.engine.pool.free_pages

    @property
    def scheduler_epoch(self) -> int:
        """The highest scheduler epoch that has spoken to this worker; 0 before the first."""
        return self._scheduler_epoch

    def check_epochs(self, worker_epoch: int, scheduler_epoch: int) -> None:
        """Raises WrongEpochError unless these are the worker's own epoch and its present scheduler's."""
        if worker_epoch != self.worker_epoch:
            raise WrongEpochError(f"worker_epoch is {worker_epoch}, this worker's is {self.worker_epoch}")
        if scheduler_epoch != self._scheduler_epoch:
            raise WrongEpochError(f"scheduler_epoch is {scheduler_epoch}, {self._scheduler_epoch} has the worker")

    def clock(self) -> float:
        """The clock on which `execute` expects arrival times."""
        return self._clock()

    def describe(self) -> worker_pb2.WorkerDescription:
        return to_wire(
            worker_pb2.WorkerDescription,
            self.engine.description,
            role=ROLES.to_wire(self.role),
            worker_epoch=self.worker_epoch,
            free_pages=self.free_pages,
            process_id=os.getpid(),
        )

    def execute(
        self, request: worker_pb2.StepRequest, arrived: float, computing: Computing = no_callback
    ) -> worker_pb2.StepReply:
        """Runs a step that arrived at `arrived`, on `clock`. A repeated step gets the reply that it had before.

        An empty step with id 0 only tells the worker its scheduler's epoch, and may come at any time. A draining worker
        refuses every step with a new sequence, as a whole, and every new scheduler; the sender then goes elsewhere with
        all of it. `computing` is passed to the engine.
        """
        if request.worker_epoch != self.worker_epoch:
            error = f"worker_epoch is {request.worker_epoch}, this worker's is {self.worker_epoch}"
            return self._refuse(request, worker_pb2.STEP_STATUS_WRONG_EPOCH, error)
        if request.scheduler_epoch < self._scheduler_epoch:
            error = f"scheduler_epoch is {request.scheduler_epoch}, one with {self._scheduler_epoch} has taken over"
            return self._refuse(request, worker_pb2.STEP_STATUS_FENCED, error)
        newcomer = request.scheduler_epoch > self._scheduler_epoch
        if newcomer:
            self._sequences.drop_all()
            self._replies.clear()
            self._last_step_id = -1
            self._scheduler_epoch = request.scheduler_epoch
        if newcomer and self.draining:
            return self._refuse(request, worker_pb2.STEP_STATUS_INVALID, _DRAINING)
        if not request.step_id and not request.rows and not request.released_sequence_ids:
            return worker_pb2.StepReply(
                worker_epoch=self.worker_epoch, status=worker_pb2.STEP_STATUS_OK, free_pages=self.free_pages
            )
        cached = self._replies.get(request.step_id)
        if cached is not None:
            return cached
        if self.draining and any(row.sequence_id not in self._sequences for row in request.rows):
            return self._refuse(request, worker_pb2.STEP_STATUS_INVALID, _DRAINING)
        if request.step_id <= self._last_step_id:
            error = f"step_id is {request.step_id}, must be above {self._last_step_id} or one of the last replies'"
            return self._refuse(request, worker_pb2.STEP_STATUS_INVALID, error)
        self._last_step_id = request.step_id
        reply = self._run(request, arrived, computing)
        self._replies[request.step_id] = reply
        while len(self._replies) > _CACHED_REPLIES:
            self._replies.popitem(last=False)
        return reply

    def check_integrity(self) -> None:
        """To be called between steps. Raises RuntimeError where tokens, tables and pages do not agree."""
        self._sequences.check_integrity()

    @abstractmethod
    def _compute(self, rows: Running, computing: Computing) -> StepOutcome:
        """Runs the engine on a row or more."""

    @abstractmethod
    def _computed(self, prepared: PreparedRow, outcome: RowOutcome) -> Sequence[int]:
        """The tokens after the row's own that have valid KV now."""

    def _run(self, request: worker_pb2.StepRequest, arrived: float, computing: Computing) -> worker_pb2.StepReply:
        started = self._clock()
        idle = 0.0 if self._ended is None else started - self._ended
        self._sequences.release(request.released_sequence_ids)
        replies, running = self._prepare(request.rows)
        running += self._prepare_following(request.following, len(request.rows), replies)
        followed: list[Followed | None] = [None] * len(request.following.sequence_ids)
        checked = self._clock()
        timings = EngineTimings()
        if running:
            try:
                outcome = self._compute([(prepared, row) for _, prepared, row in running], computing)
                if len(outcome.rows) != len(running):
                    raise RuntimeError(f"the engine answered {len(outcome.rows)} of {len(running)} rows")
            except Exception as error:
                if self.engine.device_lost:
                    # Failed rows would blame their sequences, and a worker that fails at once looks idle.
                    raise DeviceLostError(f"the device is lost: {one_line(error)}") from error
                # How far the step came is unknown, so the KV of all its sequences may be wrong.
                logger.exception("step %d failed as a whole", request.step_id)
                for index, prepared, _ in running:
                    self._sequences.stop_sharing(prepared.sequence)
                    self._sequences.drop(prepared.sequence.sequence_id)
                    replies[index] = _failure(prepared.sequence.sequence_id, one_line(error))
            else:
                timings = outcome.timings
                for (index, prepared, _), row_outcome in zip(running, outcome.rows, strict=True):
                    failure = self._settle(prepared, row_outcome)
                    if failure is not None:
                        replies[index] = failure
                        continue
                    place = index - len(request.rows)
                    if place < 0 or row_outcome.logprobs:
                        replies[index] = _reply(prepared, row_outcome)
                    else:
                        followed[place] = _followed(prepared, row_outcome)
        ended = self._ended = self._clock()
        return worker_pb2.StepReply(
            worker_epoch=self.worker_epoch,
            step_id=request.step_id,
            status=worker_pb2.STEP_STATUS_OK,
            rows=[replies[index] for index in sorted(replies)],
            followed=followed_to_wire(followed) if followed else None,
            timings=worker_pb2.StepTimings(
                queued=max(started - arrived, 0.0),
                idle=idle,
                prepare=timings.prepare + checked - started,
                realign=timings.realign,
                forward=timings.forward,
                sample=timings.sample,
                total=ended - started,
                packed_rows=timings.batched_tokens,
                padding_rows=timings.padding_rows,
            ),
            free_pages=self.free_pages,
        )

    def _prepare(
        self, rows: Sequence[worker_pb2.Row]
    ) -> tuple[dict[int, worker_pb2.RowReply], list[tuple[int, PreparedRow, worker_pb2.Row | None]]]:
        """Replies to rows that cannot or need not run, and the other rows as prepared; both by place in the step."""
        replies: dict[int, worker_pb2.RowReply] = {}
        running: list[tuple[int, PreparedRow, worker_pb2.Row | None]] = []
        seen: set[int] = set()
        outcomes = rows[0].outcomes if rows else 0
        for index, row in enumerate(rows):
            sequence_id = row.sequence_id
            if sequence_id in seen:
                error = f"sequence_id {sequence_id} comes twice in the step"
                replies[index] = _failure(sequence_id, error, RowStatus.INVALID)
                continue
            seen.add(sequence_id)
            if bool(row.outcomes) != bool(outcomes):
                error = f"outcomes is {row.outcomes}, and {outcomes} in the first row: all rows have it or none"
                replies[index] = _failure(sequence_id, error, RowStatus.INVALID)
                continue
            try:
                prepared = self._sequences.prepare(row)
            except RowRejectedError as rejected:
                replies[index] = _rejection(sequence_id, rejected)
                continue
            if prepared.tokens:
                running.append((index, prepared, row))
            else:
                nothing = RowOutcome([])
                replies[index] = self._settle(prepared, nothing) or _reply(prepared, nothing)
        return replies, running

    def _prepare_following(
        self, following: worker_pb2.FollowingRows, first: int, replies: dict[int, worker_pb2.RowReply]
    ) -> list[tuple[int, PreparedRow, worker_pb2.Row | None]]:
        """As `_prepare`; the first of them has the place `first`."""
        running: list[tuple[int, PreparedRow, worker_pb2.Row | None]] = []
        lengths = following.draft_lengths or [0] * len(following.sequence_ids)
        columns = zip(following.sequence_ids, following.kv_lens, following.prefix_digests, lengths, strict=True)
        for index, columns_of_row in enumerate(columns, first):
            try:
                running.append((index, self._sequences.follow(*columns_of_row), None))
            except RowRejectedError as rejected:
                replies[index] = _rejection(columns_of_row[0], rejected)
        return running

    def _settle(self, prepared: PreparedRow, outcome: RowOutcome) -> worker_pb2.RowReply | None:
        """Keeps of the sequence what has become valid. Returns the reply to a row that failed, else None."""
        sequence, error = prepared.sequence, outcome.error
        try:
            if error is None and not outcome.out_of_pages:
                sampled = outcome.tokens[-1] if outcome.tokens else None
                proposed = outcome.ahead[0].tokens if outcome.ahead else ()
                self._sequences.settle(sequence, self._computed(prepared, outcome), sampled, proposed)
                return None
            if not outcome.out_of_pages:
                # Wrong KV from earlier rows may have failed this one; sequences that shared it would fail too.
                self._sequences.stop_sharing(sequence)
            self._sequences.revert(sequence, prepared.start)
        except RuntimeError as broken:
            logger.error("sequence %d: %s", sequence.sequence_id, broken)
            return _failure(sequence.sequence_id, one_line(broken))
        full = worker_pb2.ROW_STATUS_OUT_OF_PAGES
        return worker_pb2.RowReply(
            sequence_id=sequence.sequence_id,
            status=full if outcome.out_of_pages else worker_pb2.ROW_STATUS_FAILED,
            kv_len=sequence.table.length,
            prefix_digest=sequence.digest,
            error=error or f"{self.free_pages} pages are free",
            reused=prepared.reused,
        )

    def _refuse(
        self, request: worker_pb2.StepRequest, status: worker_pb2.StepStatus, error: str
    ) -> worker_pb2.StepReply:
        return worker_pb2.StepReply(
            worker_epoch=self.worker_epoch,
            step_id=request.step_id,
            status=status,
            error=error,
            free_pages=self.free_pages,
        )


class TargetStepExecutor(StepExecutor[VerifyingEngine]):
    """Steps of a target worker: feed, verify, sample."""

    role = Role.TARGET

    def _compute(self, rows: Running, computing: Computing) -> StepOutcome:
        return self.engine.step([_verify_row(prepared, row) for prepared, row in rows], computing)

    def _computed(self, prepared: PreparedRow, outcome: RowOutcome) -> Sequence[int]:
        return outcome.tokens[: outcome.accepted]


class DraftStepExecutor(StepExecutor[DraftingEngine]):
    """Steps of a draft worker: feed, propose; or prepare for the outcomes of a verification."""

    role = Role.DRAFT

    def _compute(self, rows: Running, computing: Computing) -> StepOutcome:
        asked = [(prepared, row) for prepared, row in rows if row is not None]
        if asked[0][1].outcomes:
            return self.engine.prepare([_ahead_row(*one) for one in asked], computing, self.awaited)
        return self.engine.step([_propose_row(*one) for one in asked], computing)

    def _computed(self, prepared: PreparedRow, outcome: RowOutcome) -> Sequence[int]:
        return prepared.draft_tokens or outcome.tokens[:-1]


def _verify_row(prepared: PreparedRow, row: worker_pb2.Row | None) -> VerifyRow:
    sequence = prepared.sequence
    return VerifyRow(
        table=sequence.table,
        tokens=prepared.tokens,
        draft_tokens=prepared.draft_tokens,
        sample=row is None or row.sample,
        history=sequence.history,
        prompt_length=sequence.prompt_length,
        sampling=sequence.sampling,
        logits_digests=sequence.logits_digests,
        top_logprobs=sequence.top_logprobs,
        grammar_state=sequence.grammar_state,
        draft_kv=sequence.draft_kv,
        scoring=from_wire(PromptScoring, row.scoring) if row is not None and row.HasField("scoring") else None,
        draft_length=prepared.draft_length,
    )


def _propose_row(prepared: PreparedRow, row: worker_pb2.Row) -> ProposeRow:
    sequence = prepared.sequence
    return ProposeRow(
        table=sequence.table,
        tokens=prepared.tokens,
        draft_length=row.draft_length,
        history=sequence.history,
        prompt_length=sequence.prompt_length,
        sampling=sequence.sampling,
        places=sequence.places,
        grammar_state=sequence.grammar_state,
    )


def _ahead_row(prepared: PreparedRow, row: worker_pb2.Row) -> AheadRow:
    sequence = prepared.sequence
    return AheadRow(
        table=sequence.table,
        tokens=prepared.tokens,
        assumed=prepared.draft_tokens,
        draft_length=row.draft_length,
        outcomes=row.outcomes,
        history=sequence.history,
        prompt_length=sequence.prompt_length,
        sampling=sequence.sampling,
    )


def _outcomes_to_wire(proposals: Sequence[AheadProposal]) -> worker_pb2.Outcomes:
    return worker_pb2.Outcomes(
        accepted=[proposal.accepted for proposal in proposals],
        tokens=[proposal.token for proposal in proposals],
        lengths=[len(proposal.tokens) for proposal in proposals],
        draft_tokens=[token for proposal in proposals for token in proposal.tokens],
    )


def _followed(prepared: PreparedRow, outcome: RowOutcome) -> Followed:
    proposal = outcome.ahead[0].tokens if outcome.ahead else ()
    return prepared.sequence.table.length, outcome.tokens, outcome.logits_digests, proposal


def _reply(prepared: PreparedRow, outcome: RowOutcome) -> worker_pb2.RowReply:
    """To a row that was computed."""
    sequence = prepared.sequence
    reply = worker_pb2.RowReply(
        sequence_id=sequence.sequence_id,
        status=worker_pb2.ROW_STATUS_OK,
        kv_len=sequence.table.length,
        prefix_digest=sequence.digest,
        tokens=outcome.tokens,
        accepted=outcome.accepted,
        reused=prepared.reused,
    )
    if outcome.logits_digests:
        reply.logits_digests.extend(outcome.logits_digests)
    if outcome.logprobs:
        reply.logprobs.extend(logprobs_to_wire(logprobs) for logprobs in outcome.logprobs)
    if outcome.prompt_logprobs:
        reply.prompt_logprobs.extend(logprobs_to_wire(logprobs) for logprobs in outcome.prompt_logprobs)
    if outcome.ahead:
        reply.outcomes.CopyFrom(_outcomes_to_wire(outcome.ahead))
    return reply


def _rejection(sequence_id: int, rejected: RowRejectedError) -> worker_pb2.RowReply:
    return worker_pb2.RowReply(
        sequence_id=sequence_id,
        status=ROW_STATUSES.to_wire(rejected.status),
        kv_len=rejected.kv_len,
        prefix_digest=rejected.digest,
        error=rejected.error,
    )


def _failure(sequence_id: int, error: str, status: RowStatus = RowStatus.FAILED) -> worker_pb2.RowReply:
    return worker_pb2.RowReply(
        sequence_id=sequence_id,
        status=ROW_STATUSES.to_wire(status),
        kv_len=0,
        prefix_digest=EMPTY_DIGEST,
        error=error,
    )
