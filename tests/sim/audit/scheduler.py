"""What a scheduler owes its workers: judged by what one scheduler wrote to them and read of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spool.protos import scheduler_pb2, worker_pb2
from tests.sim.audit.books import (
    CommittedTokens,
    KvBook,
    answers_of,
    digest_of,
    digests_after,
    follows,
    rows_of,
)
from tests.sim.audit.sessions import SchedulerSessions

MOST_SECONDS_OF_A_MOVE = 10.0
_SLACK = 1e-3


class _Stream:
    """One stream of steps."""

    def __init__(self, address: str, epoch: int, worker_epoch: int) -> None:
        self.address = address
        self.epoch = epoch
        self.worker_epoch = worker_epoch
        self.book = KvBook()
        self.unanswered: dict[int, worker_pb2.StepRequest] = {}
        self.unsure: set[int] = set()
        """Sequences whose KV the book may have wrong."""
        self.last_step = 0
        self.answered = False
        self.grant: worker_pb2.DraftGrant | None = None
        """The last one that was sent."""


class SchedulerAudit:
    """One scheduler. `sessions` are its ends of the sessions of gateways; `problem` is told of what breaks a rule."""

    def __init__(self, name: str, clock: Callable[[], float], problem: Callable[[str], None]) -> None:
        self.sessions = SchedulerSessions(name, clock, problem)
        self._name = name
        self._clock = clock
        self._tell = problem
        self._streams: dict[Any, _Stream] = {}
        self._last: dict[str, _Stream] = {}
        """The stream that was opened last, by the address of its worker."""
        self._sequences: dict[int, CommittedTokens] = {}
        self._known: dict[tuple[int, int, int], list[int]] = {}
        """Tokens that came with parameters, by worker, connection and sequence."""
        self._fenced_at: float | None = None
        self._gone: set[int] = set()
        self._moves: dict[Any, tuple[float, _Stream]] = {}

    def _problem(self, text: str) -> None:
        self._tell(f"{self._name}: {text}")

    # Steps.

    def wrote_step(self, call: Any, request: worker_pb2.StepRequest) -> None:
        stream = self._streams.get(call)
        if stream is None:
            stream = self._open(call, request)
        if self._fenced_at is not None and self._clock() > self._fenced_at + _SLACK:
            self._problem(f"speaks to {call.address}, although it has been fenced off")
        if (request.scheduler_epoch, request.worker_epoch) != (stream.epoch, stream.worker_epoch):
            self._problem(f"the epochs of a stream to {call.address} change")
        if not request.step_id:
            return
        request = self._filled_in(request)
        if request.step_id <= stream.last_step:
            self._problem(f"step {request.step_id} follows step {stream.last_step}")
        stream.last_step = request.step_id
        if rows_of(request) and stream.worker_epoch in self._gone:
            self._problem(f"step {request.step_id} goes to {call.address}, which has been told that it may leave")
        self._check_grant(stream, request)
        busy = {row.sequence_id: row for step in stream.unanswered.values() for row in rows_of(step)}
        for row in rows_of(request):
            self._check_row(stream, row, busy.get(row.sequence_id))
        stream.unanswered[request.step_id] = request

    def _filled_in(self, request: worker_pb2.StepRequest) -> worker_pb2.StepRequest:
        """With the tokens of rows in their place that came with the parameters of their sequences."""
        filled = worker_pb2.StepRequest()
        filled.CopyFrom(request)
        for row in filled.rows:
            known = self._known.setdefault((request.worker_epoch, request.scheduler_epoch, row.sequence_id), [])
            if row.HasField("parameters"):
                known[:] = row.parameters.committed_tokens
            if row.known_tokens:
                row.tokens.extend(known[row.kv_len : row.kv_len + row.known_tokens])
                if len(row.tokens) != row.known_tokens:
                    self._problem(
                        f"row of sequence {row.sequence_id} counts on {row.known_tokens} tokens that were not sent"
                    )
        return filled

    def _open(self, call: Any, request: worker_pb2.StepRequest) -> _Stream:
        before = self._last.get(call.address)
        if before is not None and request.scheduler_epoch <= before.epoch:
            self._problem(
                f"a connection to {call.address} has epoch {request.scheduler_epoch}, the one before had {before.epoch}"
            )
        stream = _Stream(call.address, request.scheduler_epoch, request.worker_epoch)
        self._streams[call] = self._last[call.address] = stream
        return stream

    def _check_row(self, stream: _Stream, row: worker_pb2.Row, before: worker_pb2.Row | None) -> None:
        """`before` is the last row of the sequence that is in flight there."""
        name = f"row of sequence {row.sequence_id} for {stream.address}"
        sequence = self._sequences.get(row.sequence_id)
        if sequence is None:
            sequence = self._sequences[row.sequence_id] = CommittedTokens()
        if row.HasField("parameters"):
            parameters = row.parameters
            sequence.prompt_length = parameters.prompt_length
            self._say(sequence, name, 0, [digest_of(()), *digests_after(digest_of(()), parameters.committed_tokens)])
            if not self.sessions.expects(sequence, tuple(parameters.expected_output)):
                self._problem(f"{name} opens it with expected_output {list(parameters.expected_output)}")
        unsure = row.sequence_id in stream.unsure
        if follows(row):
            self._check_follows(stream, name, sequence, row, before)
            return
        if before is not None and not unsure:
            digest = _digest_of(sequence, before)
            end = before.kv_len + len(before.tokens) + follows(before)
            known = row.kv_len > end and stream.book.digest(row.sequence_id, row.kv_len) == row.prefix_digest
            goes_on = not before.sample and (known or (row.kv_len, row.prefix_digest) == (end, digest))
            if not goes_on:
                self._problem(f"{name} does not wait for the answer to the one before")
        elif not unsure and stream.book.digest(row.sequence_id, row.kv_len) != row.prefix_digest:
            has = stream.book.kv_len(row.sequence_id)
            self._problem(f"{name} counts on {row.kv_len} positions of KV, by its replies it has {has}, or other ones")
        digests = [row.prefix_digest, *digests_after(row.prefix_digest, row.tokens)]
        self._say(sequence, name, row.kv_len, digests)
        if row.verify and not row.sample:
            self._problem(f"{name} is to verify, and not to sample")
        if not self.sessions.wants(sequence):
            self._problem(f"{name}: nobody waits for the sequence any more")

    def _check_follows(
        self,
        stream: _Stream,
        name: str,
        sequence: CommittedTokens,
        row: worker_pb2.Row,
        before: worker_pb2.Row | None,
    ) -> None:
        """The row before it is in flight, and samples. All rows before that one are answered."""
        if before is None or not before.sample:
            self._problem(f"{name} follows none that samples")
            return
        end = before.kv_len + len(before.tokens)
        if follows(before):
            end = row.kv_len if row.sequence_id in stream.unsure else stream.book.kv_len(row.sequence_id) + 1
        if row.kv_len != end:
            self._problem(f"{name} follows one that ends elsewhere than at {row.kv_len}")
        elif sequence.digests.get(row.kv_len) != row.prefix_digest:
            self._problem(f"{name} follows one that feeds other tokens")
        if row.tokens or row.HasField("parameters") or not row.sample:
            self._problem(f"{name} follows another, and has more than that")
        if not self.sessions.wants(sequence):
            self._problem(f"{name}: nobody waits for the sequence any more")

    def _check_grant(self, stream: _Stream, request: worker_pb2.StepRequest) -> None:
        """Of a draft worker that is up and stays; a later grant has a higher number."""
        name = f"step {request.step_id} for {stream.address}"
        if request.wait_seconds < 0 or (request.wait_seconds > 0 and not request.HasField("grant")):
            self._problem(f"{name} may wait {request.wait_seconds} s for a draft worker, and has grant {request.grant}")
        if not request.HasField("grant"):
            return
        grant, before = request.grant, stream.grant
        draft = self._last.get(grant.address)
        if draft is None or not draft.answered or draft.worker_epoch != grant.draft_epoch:
            self._problem(f"{name} grants a draft worker at {grant.address} that has not answered")
        if grant.draft_epoch in self._gone:
            self._problem(f"{name} grants the draft worker at {grant.address}, which has been told that it may leave")
        if before is not None and before != grant and grant.number <= before.number:
            self._problem(f"{name} has grant {grant.number} for {grant.address}, the one before was {before.number}")
        stream.grant = grant

    def _say(self, sequence: CommittedTokens, name: str, position: int, digests: list[int]) -> None:
        place = sequence.say(position, digests)
        if place is not None:
            self._problem(f"{name}: its first {place} tokens are others than they were before")

    def read_reply(self, call: Any, reply: worker_pb2.StepReply) -> None:
        stream = self._streams[call]
        if reply.status == worker_pb2.STEP_STATUS_FENCED and self._fenced_at is None:
            self._fenced_at = self.sessions.fenced_at = self._clock()
        if reply.status != worker_pb2.STEP_STATUS_OK:
            return
        stream.answered = True
        request = stream.unanswered.pop(reply.step_id, None)
        if request is None:
            return
        problem = stream.book.settle(request, reply)
        if problem is not None:
            # A reply that has overtaken another one, or the worker's fault, which is told where it writes the reply.
            stream.unsure.update(row.sequence_id for row in rows_of(request))
        rows, answers = rows_of(request), answers_of(reply)
        if answers is None or len(rows) != len(answers):
            return
        for row, answer in zip(rows, answers, strict=True):
            if answer.status != worker_pb2.ROW_STATUS_OK or not answer.tokens:
                continue
            sequence = self._sequences[row.sequence_id]
            # Where a row that follows began, its answer tells.
            end = answer.kv_len - answer.accepted if follows(row) else row.kv_len + len(row.tokens)
            digest = sequence.digests.get(end) if follows(row) else _digest_of(sequence, row)
            if digest is not None:
                grown = digests_after(digest, answer.tokens)
                self._say(sequence, f"reply of {stream.address} for sequence {row.sequence_id}", end + 1, grown)
                self.sessions.reached.update(grown)

    # Workers that come and go.

    def registered(self, request: scheduler_pb2.RegisterRequest, reply: scheduler_pb2.RegisterReply) -> None:
        if reply.state != scheduler_pb2.WORKER_STATE_IN_USE:
            return
        # A later start of the worker may be in use when a request of an earlier one is answered late.
        epoch, streams = request.description.worker_epoch, self._streams.values()
        if not any(one.answered and one.address == request.address and one.worker_epoch >= epoch for one in streams):
            self._problem(f"{request.worker_id} is said to be in use, and has answered no step")

    def deregistered(self, request: scheduler_pb2.DeregisterRequest) -> None:
        self._gone.add(request.worker_epoch)

    # KV that moves.

    def moves_kv(self, call: Any, request: worker_pb2.ImportKvRequest) -> None:
        name = f"move of sequence {request.sequence_id} to {call.address}"
        there, source = self._last.get(call.address), self._last.get(request.source_address)
        asked = (request.worker_epoch, request.scheduler_epoch)
        asked_of_source = (request.source_worker_epoch, request.source_scheduler_epoch)
        if there is None or source is None:
            self._problem(f"{name}: one of the two workers has no stream")
            return
        if asked != (there.worker_epoch, there.epoch) or asked_of_source != (source.worker_epoch, source.epoch):
            self._problem(f"{name} has epochs {asked} and {asked_of_source}, which are not those of the streams")
        digests = [digest_of(()), *digests_after(digest_of(()), request.tokens)]
        known = request.sequence_id not in source.unsure
        if known and source.book.digest(request.sequence_id, len(request.tokens)) != digests[-1]:
            self._problem(f"{name} is of {len(request.tokens)} positions, which the source does not have")
        self._say(self._sequences[request.sequence_id], name, 0, digests)
        self._moves[call] = (self._clock(), there)

    def moved_kv(self, call: Any, request: worker_pb2.ImportKvRequest) -> None:
        began, stream = self._moves.pop(call)
        took = self._clock() - began
        if took > MOST_SECONDS_OF_A_MOVE + _SLACK:
            self._problem(f"move of sequence {request.sequence_id} took {took:.3f} s")
        stream.book.take_in(request)


def _digest_of(sequence: CommittedTokens, row: worker_pb2.Row) -> int | None:
    """Of the tokens up to the last one that the row feeds; None where the answer before is not known."""
    if follows(row):
        return sequence.digests.get(row.kv_len + 1)
    return digests_after(row.prefix_digest, row.tokens)[-1]
