"""Computes for all targets of a draft worker, batch by batch, on the one thread that computes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field

from engine.drafting.draft_kv import DraftKv
from engine.drafting.model_drafting import DraftAnswer, DraftAsk, ModelDrafting
from engine.errors import DeviceLostError
from engine.kv.pages import PagePool
from protos import draft_pb2
from scheduler.state.digests import DigestedTokens
from services.worker.drafting.limits import MAX_SEQUENCES, BadMessageError, check_at_most
from services.worker.drafting.messages import Answer, Verdict, VerdictsOfStep, answers_to_wire
from services.worker.drafting.target_stream import DraftedSequence, TargetStream
from services.worker.ending import end_process

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Reply:
    """What one batch has to say to one target."""

    answers: list[Answer] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    refusal: BadMessageError | None = None


class Batcher:
    """Takes whatever waits on any stream whenever the thread is free, and never waits for more.

    `add` and `close` are called on the event loop, and everything else runs on `thread`. A sequence's latest request
    counts. Sequences that lag by more than a page have batches of their own, in turn with the others, so that reading a
    prompt delays the proposals of others by one pass at most. When pages run out, a sequence takes those of others that
    nobody has asked for since it was asked for before itself; where there are none, it gets no proposal the first time,
    and is refused the second.

    A device that is lost ends the process: its targets go on without it.
    """

    def __init__(self, drafting: ModelDrafting, pool: PagePool, thread: Executor) -> None:
        self._drafting = drafting
        self._pool = pool
        self._thread = thread
        self._lock = threading.Lock()
        # Under the lock.
        self._arrived: dict[TargetStream, None] = {}
        self._ended: list[TargetStream] = []
        self._scheduled = False
        # Of the thread that computes.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[TargetStream, None] = {}
        self._waiting: dict[DraftedSequence, TargetStream] = {}
        self._number = 0
        self._reading_next = False
        # Read by the event loop as well.
        self.busy_seconds = 0.0
        self._began: float | None = None

    @property
    def queued(self) -> int:
        """Sequences that wait to be drafted for, of all targets."""
        return len(self._waiting) + sum(len(step.verdicts) for stream in [*self._arrived] for step in [*stream.arrived])

    @property
    def sequences(self) -> int:
        return sum(len(stream.sequences) for stream in [*self._streams])

    def running_seconds(self) -> float | None:
        """How long the present batch has been running; None between batches."""
        began = self._began
        return None if began is None else time.monotonic() - began

    def add(self, stream: TargetStream, step: VerdictsOfStep) -> None:
        self._loop = asyncio.get_running_loop()
        with self._lock:
            if not stream.closed:
                stream.arrived.append(step)
                self._arrived[stream] = None
                self._schedule()

    def close(self, stream: TargetStream) -> None:
        """Frees what the stream's sequences hold."""
        with self._lock:
            stream.closed = True
            stream.arrived.clear()
            self._ended.append(stream)
            self._schedule()
        stream.note_taken()

    def _schedule(self) -> None:
        """Under the lock. A batch is a call of its own, so that other calls to the thread come between two."""
        if not self._scheduled:
            try:
                self._thread.submit(self._run)
            except RuntimeError:
                return  # the worker has stopped
            self._scheduled = True

    # On the thread that computes.

    def _run(self) -> None:
        began = self._began = time.monotonic()
        try:
            self._batch()
        except DeviceLostError as error:
            end_process(str(error))
        except Exception as error:
            # What the draft has of any sequence is unknown now. Targets begin anew with streams of their own.
            logger.exception("a batch has failed")
            try:
                self._drop_all(BadMessageError(f"a batch has failed: {type(error).__name__}: {error}", "INTERNAL"))
            except Exception:
                logger.exception("sequences cannot be dropped")
                end_process("what a failed batch has left cannot be freed")
        self.busy_seconds += time.monotonic() - began
        self._began = None
        with self._lock:
            self._scheduled = False
            if self._arrived or self._ended or self._waiting:
                self._schedule()

    def _batch(self) -> None:
        self._number += 1
        replies: dict[TargetStream, Reply] = {}
        with self._lock:
            ended, self._ended = self._ended, []
            arrived = [(stream, [*stream.arrived]) for stream in self._arrived]
            for stream in self._arrived:
                stream.arrived.clear()
            self._arrived.clear()
        for stream, steps in arrived:
            self._streams[stream] = None
            reply = replies[stream] = Reply()
            try:
                for step in steps:
                    self._apply(stream, step, reply)
            except BadMessageError as error:
                reply.refusal = error
        for stream in ended:
            self._drop(stream)
        asked = self._with_pages(self._chosen(), replies)
        answers = self._drafting.propose([_ask(one) for one in asked])
        for one, answer in zip(asked, answers, strict=True):
            one.served = self._number
            if not answer.behind:
                self._answer(one, answer, replies)
        self._send(replies)

    def _apply(self, stream: TargetStream, step: VerdictsOfStep, reply: Reply) -> None:
        """Raises BadMessageError."""
        stream.round = step.round
        for sequence_id in step.closed_ids:
            self._forget(stream, sequence_id)
        new = sum(one.sequence_id not in stream.sequences for one in step.verdicts if one.opened is not None)
        check_at_most("the number of sequences", len(stream.sequences) + new, MAX_SEQUENCES, "RESOURCE_EXHAUSTED")
        for verdict in step.verdicts:
            sequence_id = verdict.sequence_id
            if verdict.length > self._drafting.description.max_sequence_length:
                self._forget(stream, sequence_id)
                reply.refused.append(sequence_id)
                continue
            one = self._sequence(stream, verdict)
            if one is None or not _follow(one, verdict):
                self._forget(stream, sequence_id)
                reply.unknown.append(sequence_id)
                continue
            if verdict.draft_length and verdict.length <= one.prompt_length:
                raise BadMessageError(
                    f"lengths holds {verdict.length} for sequence {sequence_id}, must be above its prompt_length "
                    f"{one.prompt_length} with a draft_length of {verdict.draft_length}"
                )
            one.draft_length = verdict.draft_length
            if one.asked < self._number:
                one.asked_before, one.asked = one.asked, self._number
            self._waiting[one] = stream

    def _sequence(self, stream: TargetStream, verdict: Verdict) -> DraftedSequence | None:
        """The sequence of a verdict; None where it is not known."""
        sequence_id, opened = verdict.sequence_id, verdict.opened
        if opened is None:
            return stream.sequences.get(sequence_id)
        self._forget(stream, sequence_id)
        one = DraftedSequence(
            sequence_id,
            opened.prompt_length,
            opened.sampling,
            DraftKv([opened.cache_scope]),
            DigestedTokens(opened.tokens),
        )
        stream.sequences[sequence_id] = one
        return one

    def _chosen(self) -> list[DraftedSequence]:
        """Those of the waiting sequences for which the next batch is."""
        reading = [one for one in self._waiting if one.lag > self._pool.page_size]
        if not reading or len(reading) == len(self._waiting):
            return [*self._waiting]
        self._reading_next = not self._reading_next
        if not self._reading_next:
            return reading
        return [one for one in self._waiting if one.lag <= self._pool.page_size]

    def _with_pages(
        self, chosen: Sequence[DraftedSequence], replies: dict[TargetStream, Reply]
    ) -> list[DraftedSequence]:
        """Those for which there are pages; the others are answered."""
        fitting: list[DraftedSequence] = []
        reserved = 0
        for one in chosen:
            needed = self._pool.missing(one.kv.table, len(one.tokens) + max(one.draft_length - 1, 0))
            while reserved + needed > self._pool.free_pages and (idle := self._idle(one)) is not None:
                idle.kv.drop()
                idle.asked = idle.asked_before = 0
            if reserved + needed <= self._pool.free_pages:
                reserved += needed
                fitting.append(one)
            else:
                self._answer(one, DraftAnswer(refused=one.asked_before > 0), replies)
        return fitting

    def _idle(self, claimant: DraftedSequence) -> DraftedSequence | None:
        """Of the sequences with pages that others may take, the one computed for least lately."""
        idle = [
            one
            for stream in self._streams
            for one in stream.sequences.values()
            if one.served < claimant.asked_before and one.kv.table.length and one not in self._waiting
        ]
        return min(idle, key=lambda one: one.served, default=None)

    def _answer(self, one: DraftedSequence, answer: DraftAnswer, replies: dict[TargetStream, Reply]) -> None:
        stream = self._waiting.pop(one)
        reply = replies.setdefault(stream, Reply())
        if answer.refused:
            self._forget(stream, one.sequence_id)
            reply.refused.append(one.sequence_id)
        digest = one.tokens.digest(len(one.tokens))
        reply.answers.append(Answer(one.sequence_id, digest, answer.tokens))

    def _forget(self, stream: TargetStream, sequence_id: int) -> None:
        one = stream.sequences.pop(sequence_id, None)
        if one is not None:
            self._waiting.pop(one, None)
            one.kv.drop()

    def _drop(self, stream: TargetStream) -> None:
        for sequence_id in [*stream.sequences]:
            self._forget(stream, sequence_id)
        self._streams.pop(stream, None)

    def _drop_all(self, refusal: BadMessageError) -> None:
        streams = [*self._streams]
        for stream in streams:
            self._drop(stream)
        self._send({stream: Reply(refusal=refusal) for stream in streams})

    def _send(self, replies: dict[TargetStream, Reply]) -> None:
        messages = [(stream, reply, _proposals(reply, stream.round)) for stream, reply in replies.items()]
        if messages and self._loop is not None:
            with suppress(RuntimeError):  # the worker has stopped meanwhile, and its loop is closed
                self._loop.call_soon_threadsafe(_hand_over, messages)


def _proposals(reply: Reply, round_of_target: int) -> draft_pb2.Proposals:
    proposals = answers_to_wire(reply.answers)
    proposals.round = round_of_target
    proposals.unknown_ids.extend(reply.unknown)
    proposals.refused_ids.extend(reply.refused)
    return proposals


def _follow(one: DraftedSequence, verdict: Verdict) -> bool:
    """Applies a verdict to the tokens. Whether they are the target's then."""
    start = verdict.length - len(verdict.tokens)
    if start > len(one.tokens):
        return False
    one.tokens.truncate(start)
    one.kv.truncate(start)
    one.tokens.extend(verdict.tokens)
    return one.tokens.digest(verdict.length) == verdict.digest


def _ask(one: DraftedSequence) -> DraftAsk:
    return DraftAsk(one.kv, one.tokens.tokens, (), one.prompt_length, one.sampling, one.draft_length)


def _hand_over(messages: Iterable[tuple[TargetStream, Reply, draft_pb2.Proposals]]) -> None:
    """On the event loop."""
    for stream, reply, proposals in messages:
        stream.note_taken()
        if reply.answers or reply.unknown or reply.refused:
            stream.answers.put_nowait(proposals)
        if reply.refusal is not None:
            stream.end(reply.refusal)
