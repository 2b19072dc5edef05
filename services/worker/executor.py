"""Runs the steps of one worker: turns rows of the protocol into rows of the engine, and their outcomes into replies.

Not thread-safe: `execute` and `offer` are called from one thread. Other threads may read `sequences` and `free_pages`,
which are plain lengths.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from spool.engine.description import EngineDescription
from spool.engine.drafting.proposer import Asked, Proposers
from spool.engine.errors import DeviceLostError, one_line
from spool.engine.kv.kv_store import KvStore
from spool.engine.kv.pages import PagePool
from spool.engine.steps import Computing, EngineTimings, RowOutcome, StepOutcome, VerifyRow, no_callback
from spool.protos import worker_pb2
from spool.scheduler.messages import ProposalSource, Role, RowResult, RowStatus
from spool.scheduler.state.digests import EMPTY_DIGEST
from spool.services.rpc.conversion import to_wire
from spool.services.rpc.worker_codec import ROLES, answers_to_wire, report_to_wire
from spool.services.worker.kv_pages import KvTransfer, WrongEpochError
from spool.services.worker.sequences import RowRejectedError, WorkerSequence, WorkerSequences

logger = logging.getLogger(__name__)

_CACHED_REPLIES = 16

_Computed = tuple[int, int, int, RowOutcome, int, int, ProposalSource | None]
"""Of a row that was computed: its sequence, the sequence's length and digest then, the outcome, how many positions were
reused and proposed tokens verified, and who proposed these."""

_DRAINING = "the worker is draining and takes no new sequences"


class Reply:
    """Makes its message when it is first called: by the thread that sends it, while the next pass computes. So `make`
    reads nothing that a step changes."""

    def __init__(self, make: Callable[[], worker_pb2.StepReply]) -> None:
        self._make = make

    def __call__(self) -> worker_pb2.StepReply:
        message = self._make()
        # What it was made of is not kept.
        self._make = lambda: message
        return message


class VerifyingEngine(Protocol):
    """What a target needs of an engine. Rows fail singly, through `RowOutcome.error`."""

    @property
    def description(self) -> EngineDescription: ...

    @property
    def pool(self) -> PagePool: ...

    @property
    def device_lost(self) -> bool:
        """Whether every later step must fail, too. Asked after a step that failed as a whole."""
        ...

    def step(self, rows: Sequence[VerifyRow], computing: Computing) -> StepOutcome: ...


class RemoteDraft(Protocol):
    """The part of a target that asks draft workers for proposals; also a `Proposer`."""

    def set_grant(self, grant: worker_pb2.DraftGrant | None) -> None:
        """Which draft worker may be asked from now on. Called in every step, before anything is asked."""
        ...


@dataclass(slots=True)
class _Offers:
    """What is to be offered once the reply has left."""

    released: bool = False
    """Whether sequences have ended, of which a draft worker is to hear."""
    rows: list[VerifyRow] = field(default_factory=list)
    outcomes: list[RowOutcome] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)


class StepExecutor:
    """Executes one step of a target at a time, and keeps the last replies so that a repeated step is safe.

    `worker_epoch` must differ between two starts of a worker. `clock` is a monotonic clock in seconds. Without a
    `kv_store`, the worker neither gives KV to other workers nor takes KV from them. `remote` is the part of the
    `proposer` that asks draft workers, if there is one.
    """

    role = Role.TARGET

    def __init__(
        self,
        engine: VerifyingEngine,
        worker_epoch: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        kv_store: KvStore | None = None,
        prefix_cache: bool = True,
        proposer: Proposers | None = None,
        remote: RemoteDraft | None = None,
    ) -> None:
        self.engine = engine
        self._proposer = proposer or Proposers()
        self._remote = remote
        self._clock = clock
        self.worker_epoch = time.time_ns() if worker_epoch is None else worker_epoch
        self._sequences = WorkerSequences(engine.pool, engine.description, prefix_cache, self._proposer.forget)
        self.kv_transfer = KvTransfer(self._sequences, kv_store, self.check_epochs)
        self._scheduler_epoch = 0
        self._last_step_id = -1
        self._replies: OrderedDict[int, Reply] = OrderedDict()
        self._offers = _Offers()
        self._ended: float | None = None
        self._offer_seconds = 0.0
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

    def execute(self, request: worker_pb2.StepRequest, arrived: float, computing: Computing = no_callback) -> Reply:
        """Runs a step that arrived at `arrived`, on `clock`. A repeated step gets the reply that it had before. `offer`
        is to be called once the reply has left, before the next step.

        An empty step with id 0 only tells the worker its scheduler's epoch, and may come at any time. A draining worker
        refuses every step with a new sequence, as a whole, and every new scheduler; the sender then goes elsewhere with
        all of it. `computing` is passed to the engine.
        """
        if request.worker_epoch != self.worker_epoch:
            error = f"worker_epoch is {request.worker_epoch}, this worker's is {self.worker_epoch}"
            return self._answer(request, worker_pb2.STEP_STATUS_WRONG_EPOCH, error)
        if request.scheduler_epoch < self._scheduler_epoch:
            error = f"scheduler_epoch is {request.scheduler_epoch}, one with {self._scheduler_epoch} has taken over"
            return self._answer(request, worker_pb2.STEP_STATUS_FENCED, error)
        newcomer = request.scheduler_epoch > self._scheduler_epoch
        if newcomer:
            self._sequences.drop_all()
            self._replies.clear()
            self._last_step_id = -1
            self._scheduler_epoch = request.scheduler_epoch
        if newcomer and self.draining:
            return self._answer(request, worker_pb2.STEP_STATUS_INVALID, _DRAINING)
        if not request.step_id and not request.rows and not request.released_sequence_ids:
            return self._answer(request, worker_pb2.STEP_STATUS_OK)
        cached = self._replies.get(request.step_id)
        if cached is not None:
            return cached
        if self.draining and any(row.sequence_id not in self._sequences for row in request.rows):
            return self._answer(request, worker_pb2.STEP_STATUS_INVALID, _DRAINING)
        if request.step_id <= self._last_step_id:
            error = f"step_id is {request.step_id}, must be above {self._last_step_id} or one of the last replies'"
            return self._answer(request, worker_pb2.STEP_STATUS_INVALID, error)
        if (uneven := _uneven(request.following)) is not None:
            return self._answer(request, worker_pb2.STEP_STATUS_INVALID, uneven)
        self._last_step_id = request.step_id
        reply = self._run(request, arrived, computing)
        self._replies[request.step_id] = reply
        while len(self._replies) > _CACHED_REPLIES:
            self._replies.popitem(last=False)
        return reply

    def check_integrity(self) -> None:
        """To be called between steps. Raises RuntimeError where tokens, tables and pages do not agree."""
        self._sequences.check_integrity()

    @property
    def has_offers(self) -> bool:
        """Whether `offer` has something to do."""
        return self._offers.released or bool(self._offers.rows)

    def offer(self) -> None:
        """Proposes what the last step asked for. Raises DeviceLostError."""
        if not self.has_offers:
            return
        offers, self._offers = self._offers, _Offers()
        began = self._clock()
        try:
            self._proposer.offer(offers.rows, offers.outcomes, offers.digests)
        except Exception as error:
            if self.engine.device_lost or isinstance(error, DeviceLostError):
                raise DeviceLostError(f"the device is lost: {one_line(error)}") from error
            logger.exception("nothing is proposed after step %d", self._last_step_id)
        self._ended = self._clock()
        self._offer_seconds += self._ended - began

    def _run(self, request: worker_pb2.StepRequest, arrived: float, computing: Computing) -> Reply:
        started = self._clock()
        idle = 0.0 if self._ended is None else started - self._ended
        self._offers = _Offers(self._remote is not None and bool(request.released_sequence_ids))
        if self._remote is not None:
            self._remote.set_grant(request.grant if request.HasField("grant") else None)
        self._sequences.release(request.released_sequence_ids)
        results: dict[int, RowResult | _Computed] = {}
        running = self._prepare(request.rows, results)
        self._prepare_following(request.following, len(request.rows), running, results)
        checked = self._clock()
        rows = list(running.values())
        self._add_proposals(rows, request.wait_seconds)
        proposed = self._clock()
        timings = EngineTimings()
        if running:
            try:
                outcome = self.engine.step(rows, computing)
                if len(outcome.rows) != len(running):
                    raise RuntimeError(f"the engine answered {len(outcome.rows)} of {len(running)} rows")
            except Exception as error:
                if self.engine.device_lost:
                    # Failed rows would blame their sequences, and a worker that fails at once looks idle.
                    raise DeviceLostError(f"the device is lost: {one_line(error)}") from error
                # How far the step came is unknown, so the KV of all its sequences may be wrong.
                logger.exception("step %d failed as a whole", request.step_id)
                for place, row in running.items():
                    self._sequences.stop_sharing(row)
                    self._sequences.drop(row.sequence_id)
                    results[place] = _failure(row.sequence_id, one_line(error))
            else:
                timings = outcome.timings
                for (place, row), row_outcome in zip(running.items(), outcome.rows, strict=True):
                    settled = results[place] = self._settle(row, row_outcome)
                    asks = row.draft_length or row.lookup_length or self._proposer.remembers
                    if asks and self.engine.pool.rewinds and not isinstance(settled, RowResult):
                        self._add_offer(row, row_outcome)
        report = self._proposer.report()
        ended = self._ended = self._clock()
        offered, self._offer_seconds = self._offer_seconds, 0.0
        step_id, free_pages = request.step_id, self.free_pages

        def make() -> worker_pb2.StepReply:
            answers = [results[place] for place in range(len(results))]
            return worker_pb2.StepReply(
                worker_epoch=self.worker_epoch,
                step_id=step_id,
                status=worker_pb2.STEP_STATUS_OK,
                rows=answers_to_wire([one if isinstance(one, RowResult) else _result(*one) for one in answers]),
                timings=worker_pb2.StepTimings(
                    queued=max(started - arrived, 0.0),
                    idle=idle,
                    prepare=timings.prepare + checked - started,
                    realign=timings.realign,
                    forward=timings.forward,
                    sample=timings.sample,
                    total=ended - started + offered,
                    packed_rows=timings.batched_tokens,
                    padding_rows=timings.padding_rows,
                    drafting=proposed - checked + offered,
                ),
                free_pages=free_pages,
                drafting=None if report is None else report_to_wire(report),
            )

        return Reply(make)

    def _prepare(
        self, rows: Sequence[worker_pb2.Row], results: dict[int, RowResult | _Computed]
    ) -> dict[int, WorkerSequence]:
        """The rows that can run, by their places in the step. Adds the results of the others."""
        running: dict[int, WorkerSequence] = {}
        seen: set[int] = set()
        for place, row in enumerate(rows):
            sequence_id = row.sequence_id
            if sequence_id in seen:
                error = f"sequence_id {sequence_id} comes twice in the step"
                results[place] = _failure(sequence_id, error, RowStatus.INVALID)
                continue
            seen.add(sequence_id)
            try:
                prepared = self._sequences.prepare(row)
            except RowRejectedError as rejected:
                results[place] = _rejection(sequence_id, rejected)
                continue
            if prepared.tokens:
                running[place] = prepared
            else:
                results[place] = self._settle(prepared, RowOutcome([]))
        return running

    def _prepare_following(
        self,
        following: worker_pb2.FollowingRows,
        first: int,
        running: dict[int, WorkerSequence],
        results: dict[int, RowResult | _Computed],
    ) -> None:
        """Adds to what `_prepare` gives; the first of them has the place `first`."""
        none = [0] * len(following.sequence_ids)
        lengths = following.draft_lengths or none
        optional = lengths, following.verify or none, following.lookup_lengths or lengths
        columns = zip(following.sequence_ids, following.kv_lens, following.prefix_digests, *optional, strict=True)
        for place, columns_of_row in enumerate(columns, first):
            try:
                running[place] = self._sequences.follow(*columns_of_row)
            except RowRejectedError as rejected:
                results[place] = _rejection(columns_of_row[0], rejected)

    def _add_proposals(self, rows: Sequence[WorkerSequence], wait_seconds: float) -> None:
        """Lets the rows verify what is proposed for them."""
        # Where tables cannot be cut anywhere, a rejected token would have the states of its page computed again. There
        # nothing is verified, nor offered to whoever proposes.
        verifying = [row for row in rows if row.verify] if self.engine.pool.rewinds else []
        if not verifying:
            return
        asked = [Asked(row.drafting, row.known.digests[-1], row.verify) for row in verifying]
        size = self.engine.description.vocabulary_size
        for row, proposal in zip(verifying, self._proposer.take(asked, wait_seconds), strict=True):
            if proposal and (not size or max(proposal) < size):
                row.draft_tokens = proposal[: row.verify]

    def _add_offer(self, row: WorkerSequence, outcome: RowOutcome) -> None:
        self._offers.rows.append(row)
        self._offers.outcomes.append(outcome)
        self._offers.digests.append(row.known.digest_with(outcome.tokens[-1:]))

    def _settle(self, row: WorkerSequence, outcome: RowOutcome) -> RowResult | _Computed:
        """Keeps of the sequence what has become valid."""
        sequence_id, error = row.sequence_id, outcome.error
        try:
            if error is None and not outcome.out_of_pages:
                tokens, length = outcome.tokens, row.table.length
                self._sequences.settle(row, tokens[: outcome.accepted], tokens[-1] if tokens else None)
                # Nobody needs the digest of a row that has sampled.
                digest = 0 if tokens else row.digest
                verified = len(row.draft_tokens)
                source = row.drafting.source if verified else None
                return sequence_id, length, digest, outcome, row.reused, verified, source
            if not outcome.out_of_pages:
                # Wrong KV from earlier rows may have failed this one; sequences that shared it would fail too.
                self._sequences.stop_sharing(row)
            self._sequences.revert(row)
        except RuntimeError as broken:
            logger.error("sequence %d: %s", sequence_id, broken)
            return _failure(sequence_id, one_line(broken))
        status = RowStatus.OUT_OF_PAGES if outcome.out_of_pages else RowStatus.FAILED
        said = error or f"{self.free_pages} pages are free"
        return RowResult(sequence_id, status, row.table.length, row.digest, error=said, reused=row.reused)

    def _answer(self, request: worker_pb2.StepRequest, status: worker_pb2.StepStatus, error: str = "") -> Reply:
        reply = worker_pb2.StepReply(
            worker_epoch=self.worker_epoch,
            step_id=request.step_id,
            status=status,
            error=error,
            free_pages=self.free_pages,
        )
        return Reply(lambda: reply)


def _uneven(following: worker_pb2.FollowingRows) -> str | None:
    """What is wrong with columns that do not fit each other."""
    size = len(following.sequence_ids)
    columns_that_may_be_empty = "draft_lengths", "verify", "lookup_lengths"
    for name in ("kv_lens", "prefix_digests", *columns_that_may_be_empty):
        found, optional = len(getattr(following, name)), name in columns_that_may_be_empty
        if found != size and (found or not optional):
            return f"following.{name} has {found} entries, must have {size} as sequence_ids has"
    return None


def _result(
    sequence_id: int,
    length: int,
    digest: int,
    outcome: RowOutcome,
    reused: int,
    verified: int,
    source: ProposalSource | None,
) -> RowResult:
    return RowResult(
        sequence_id,
        RowStatus.OK,
        length,
        digest,
        tuple(outcome.tokens),
        outcome.accepted,
        tuple(outcome.logits_digests),
        tuple(outcome.logprobs),
        reused=reused,
        prompt_logprobs=tuple(outcome.prompt_logprobs),
        verified=verified,
        source=source,
    )


def _rejection(sequence_id: int, rejected: RowRejectedError) -> RowResult:
    return RowResult(sequence_id, rejected.status, rejected.kv_len, rejected.digest, error=rejected.error)


def _failure(sequence_id: int, error: str, status: RowStatus = RowStatus.FAILED) -> RowResult:
    return RowResult(sequence_id, status, 0, EMPTY_DIGEST, error=error)
