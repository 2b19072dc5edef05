"""Computes for all targets of a draft worker, batch by batch, on the one thread that computes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial

from spool.engine.drafting.draft_kv import DraftKv
from spool.engine.drafting.model_drafting import DraftAnswer, ModelDrafting
from spool.engine.errors import DeviceLostError
from spool.engine.kv.pages import PagePool
from spool.protos import draft_pb2
from spool.scheduler.state.digests import DigestedTokens
from spool.services.worker.drafting.ahead import Ahead, AheadStep, ProposalsByTarget
from spool.services.worker.drafting.drafted_sequence import DraftedSequence, Path, Work
from spool.services.worker.drafting.limits import MAX_SEQUENCES, BadMessageError, check_at_most
from spool.services.worker.drafting.messages import Verdict, VerdictsOfStep
from spool.services.worker.drafting.target_stream import TargetStream
from spool.services.worker.ending import end_process

logger = logging.getLogger(__name__)


class Batcher:
    """Takes whatever waits on any stream whenever the thread is free, and never waits for more.

    `add` and `close` are called on the event loop, and everything else runs on `thread`. A sequence's latest request
    counts. Sequences that lag by more than a page have batches of their own, in turn with the others, so that reading a
    prompt delays the proposals of others by one pass at most. When pages run out, a sequence takes those of others that
    nobody has asked for since it was asked for before itself; where there are none, it gets no proposal the first time,
    and is refused the second.

    With `ahead`, it computes proposals for likely verdicts while nobody waits, and beside requests (ahead.py).

    A device that is lost ends the process: its targets go on without it.
    """

    def __init__(self, drafting: ModelDrafting, pool: PagePool, thread: Executor, ahead: bool = False) -> None:
        self._drafting = drafting
        self._pool = pool
        self._thread = thread
        self._lock = threading.Lock()
        # Under the lock. A stream with None for a step has ended.
        self._arrived: list[tuple[TargetStream, VerdictsOfStep | None]] = []
        self._scheduled = False
        # Of the thread that computes.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[TargetStream, None] = {}
        self._waiting: dict[DraftedSequence, TargetStream] = {}
        self._ahead = Ahead(drafting, pool)
        self._ahead_enabled = ahead
        # Of the present batch.
        self._answers: defaultdict[TargetStream, draft_pb2.Proposals] = defaultdict(draft_pb2.Proposals)
        self._answered: defaultdict[TargetStream, list[tuple[DraftedSequence, Sequence[int]]]] = defaultdict(list)
        self._calls: list[Callable[[], object]] = []
        """To be made on the event loop when the batch has ended."""
        self._number = 0
        self._reading_next = False
        # Read by the event loop as well.
        self.busy_seconds = 0.0
        self._began: float | None = None

    @property
    def queued(self) -> int:
        """Sequences that wait to be drafted for, of all targets."""
        return len(self._waiting) + sum(len(step.verdicts) for _, step in [*self._arrived] if step is not None)

    @property
    def sequences(self) -> int:
        return sum(len(stream.sequences) for stream in [*self._streams])

    def running_seconds(self) -> float | None:
        """How long the present batch has been running; None between batches."""
        began = self._began
        return None if began is None else time.monotonic() - began

    def add(self, stream: TargetStream, step: VerdictsOfStep) -> None:
        self._loop = asyncio.get_running_loop()
        stream.note(step, taken=False)
        self._put(stream, step)

    def close(self, stream: TargetStream) -> None:
        """Frees what the stream's sequences hold. Nothing more is added for it."""
        self._put(stream, None)

    def _schedule_ahead(self) -> None:
        with self._lock:
            self._schedule()

    def _put(self, stream: TargetStream, step: VerdictsOfStep | None) -> None:
        with self._lock:
            self._arrived.append((stream, step))
            self._schedule()

    def _schedule(self) -> None:
        """Under the lock. A batch is a call of its own, so that other calls to the thread come between two."""
        if not self._scheduled:
            with suppress(RuntimeError):  # the worker has stopped
                self._thread.submit(self._run)
                self._scheduled = True

    # On the thread that computes.

    def _run(self) -> None:
        began = self._began = time.monotonic()
        asked = True
        try:
            asked = self._batch()
        except DeviceLostError as error:
            end_process(str(error))
        except Exception as error:
            # What the draft has of any sequence is unknown now. Targets begin anew with streams of their own.
            logger.exception("a batch has failed")
            refusal = BadMessageError(f"a batch has failed: {type(error).__name__}: {error}", "INTERNAL")
            try:
                for stream in [*self._streams]:
                    self._refuse(stream, refusal)
            except Exception:
                logger.exception("sequences cannot be dropped")
                end_process("what a failed batch has left cannot be freed")
        if asked:
            self.busy_seconds += time.monotonic() - began
        self._began = None
        with self._lock:
            self._scheduled = False
            if self._arrived or self._waiting:
                self._schedule()
        if len(self._ahead) and self._loop is not None:
            # What is computed ahead begins once answers have left: both would want Python's lock.
            self._calls.append(partial(self._loop.call_soon, self._schedule_ahead))
        self._tell()

    def _batch(self) -> bool:
        """Whether anybody has asked for what it has computed."""
        self._number += 1
        self._answers.clear()
        self._answered.clear()
        with self._lock:
            arrived, self._arrived = self._arrived, []
        self._calls += [partial(stream.note, step, taken=True) for stream, step in arrived if step is not None]
        for stream, step in arrived:
            if step is None:
                self._drop(stream)
                continue
            self._streams[stream] = None
            try:
                self._apply(stream, step)
            except BadMessageError as error:
                self._refuse(stream, error)
        if not self._waiting and len(self._ahead):
            self._send(self._answers)
            self._send(self._ahead.compute(lambda: bool(self._arrived)))
            return False
        (asked, pages), work = self._with_pages(self._chosen()), Work()
        for one in asked:
            work.add(one.path, one.end)
        requests = [one.request(one.path, one.end, self._ahead_enabled) for one in asked]
        began, ahead = time.monotonic(), AheadStep(pages, work, work.passes)
        if len(self._ahead) and all(one.lag <= self._pool.page_size for one in asked):
            # Guesses take part in the passes of requests, which they hardly make longer, but not in reading prompts.
            self._ahead.fill(ahead)
        answers, found = self._drafting.propose(requests + ahead.requests()), ProposalsByTarget(draft_pb2.Proposals)
        if answers and self._ahead_enabled:
            self._ahead.observe_step(time.monotonic() - began, work)
        self._ahead.take(ahead, answers[len(asked) :], found)
        for one, answer in zip(asked, answers[: len(asked)], strict=True):
            one.served = self._number
            one.path.extend(answer)
            if not answer.behind:
                self._answer(one, answer)
        for stream, answered in self._answered.items():
            proposals = self._answers[stream]
            proposals.sequence_ids.extend([one.sequence_id for one, _ in answered])
            proposals.digests.extend([one.path.tokens.digest(one.committed) for one, _ in answered])
            proposals.counts.extend([len(tokens) for _, tokens in answered])
            proposals.tokens.extend([token for _, tokens in answered for token in tokens])
            if self._ahead_enabled:
                begun = [self._ahead.start_after_proposal(one, stream, found) for one, tokens in answered if tokens]
                proposals.goes_on = any(begun)
        self._send(self._answers)
        self._send(found)
        return True

    def _apply(self, stream: TargetStream, step: VerdictsOfStep) -> None:
        """Raises BadMessageError."""
        stream.step.observe(step.seconds)
        for sequence_id in step.closed_ids:
            self._forget(stream, sequence_id)
        new = sum(one.sequence_id not in stream.sequences for one in step.verdicts if one.opened is not None)
        check_at_most("the number of sequences", len(stream.sequences) + new, MAX_SEQUENCES, "RESOURCE_EXHAUSTED")
        guessed, missed = False, dict[int, DraftedSequence]()
        for verdict in step.verdicts:
            sequence_id, opened = verdict.sequence_id, verdict.opened
            missed.pop(sequence_id, None)
            if opened is not None:
                self._forget(stream, sequence_id)
                path = Path(DraftKv([opened.cache_scope]), DigestedTokens(opened.tokens))
                one = DraftedSequence(sequence_id, opened.prompt_length, opened.sampling, path, len(path))
                stream.sequences[sequence_id] = one
            known = stream.sequences.get(sequence_id)
            if known is None:
                self._answers[stream].unknown_ids.append(sequence_id)
                continue
            if known.asked < self._number:
                known.asked_before, known.asked = known.asked, self._number
            guess = self._ahead.match(known, stream, verdict)
            if guess is not None:
                known.served = self._number
                guessed |= guess.sent
                if not guess.sent:
                    missed[sequence_id] = known
            elif not _follow(known, verdict):
                self._forget(stream, sequence_id)
                self._answers[stream].unknown_ids.append(sequence_id)
            elif not self._may_propose(known, verdict):
                self._forget(stream, sequence_id)
                self._answers[stream].refused_ids.append(sequence_id)
            else:
                known.draft_length = verdict.draft_length
                missed[sequence_id] = known
        for one in missed.values():
            # A step that has some proposals goes on without the others.
            if not (guessed and one.lag <= self._pool.page_size and self._ahead.start_after_plain_step(one, stream)):
                self._waiting[one] = stream

    def _may_propose(self, one: DraftedSequence, verdict: Verdict) -> bool:
        """Not for what is too long, nor for what continues a prompt that is not whole yet."""
        if verdict.length > self._drafting.description.max_sequence_length:
            return False
        return verdict.length > one.prompt_length or not verdict.draft_length

    def _chosen(self) -> list[DraftedSequence]:
        """Those of the waiting sequences for which the next batch is."""
        reading = [one for one in self._waiting if one.lag > self._pool.page_size]
        if not reading or len(reading) == len(self._waiting):
            return [*self._waiting]
        self._reading_next = not self._reading_next
        if not self._reading_next:
            return reading
        return [one for one in self._waiting if one.lag <= self._pool.page_size]

    def _with_pages(self, chosen: Sequence[DraftedSequence]) -> tuple[list[DraftedSequence], int]:
        """Those for which there are pages, and how many they take; the others are answered."""
        fitting: list[DraftedSequence] = []
        reserved, idle = 0, None
        for one in chosen:
            needed = self._pool.missing(one.path.kv.table, max(one.end - 1, one.committed))
            while reserved + needed > self._pool.free_pages:
                if idle is None:
                    self._discard_ahead()
                    idle = self._idle()
                    continue
                if not idle or idle[0].served >= one.asked_before:
                    break
                dropped = idle.popleft()
                dropped.path.kv.drop()
                dropped.asked = dropped.asked_before = 0
            if reserved + needed <= self._pool.free_pages:
                reserved += needed
                fitting.append(one)
            else:
                self._answer(one, DraftAnswer(refused=one.asked_before > 0))
        return fitting, reserved

    def _idle(self) -> deque[DraftedSequence]:
        """Sequences with pages for which nothing is to be computed, the one computed for least lately first."""
        known = (one for stream in self._streams for one in stream.sequences.values())
        idle = [one for one in known if one.path.kv.table.length and one not in self._waiting]
        return deque(sorted(idle, key=lambda one: one.served))

    def _discard_ahead(self) -> None:
        """Frees all pages of what nobody has asked for."""
        for stream in self._streams:
            for one in stream.sequences.values():
                self._ahead.discard(one)

    def _answer(self, one: DraftedSequence, answer: DraftAnswer) -> None:
        stream, proposal = self._waiting.pop(one), one.path.tokens.tokens[one.committed : one.end]
        if answer.refused:
            self._forget(stream, one.sequence_id)
            self._answers[stream].refused_ids.append(one.sequence_id)
        self._answered[stream].append((one, () if answer.refused else proposal))

    def _forget(self, stream: TargetStream, sequence_id: int) -> None:
        one = stream.sequences.pop(sequence_id, None)
        if one is not None:
            self._waiting.pop(one, None)
            self._ahead.discard(one)
            one.path.kv.drop()

    def _drop(self, stream: TargetStream) -> None:
        for sequence_id in [*stream.sequences]:
            self._forget(stream, sequence_id)
        self._streams.pop(stream, None)
        self._answers.pop(stream, None)
        self._answered.pop(stream, None)

    def _refuse(self, stream: TargetStream, refusal: BadMessageError) -> None:
        self._drop(stream)
        self._calls.append(partial(stream.end, refusal))

    def _send(self, proposals: Mapping[TargetStream, draft_pb2.Proposals]) -> None:
        self._calls += [partial(stream.answers.put_nowait, message) for stream, message in proposals.items()]

    def _tell(self) -> None:
        calls, self._calls = self._calls, []
        if calls and self._loop is not None:
            with suppress(RuntimeError):  # the worker has stopped meanwhile, and its loop is closed
                self._loop.call_soon_threadsafe(_make, calls)


def _follow(one: DraftedSequence, verdict: Verdict) -> bool:
    """Applies a verdict to the tokens. Whether they are the target's then."""
    start, path = verdict.length - len(verdict.tokens), one.path
    if not verdict.length or not 0 <= start <= len(path):
        return False
    path.truncate(start)
    path.tokens.extend(verdict.tokens)
    one.committed = len(path)
    return path.tokens.digests[-1] == verdict.digest


def _make(calls: Sequence[Callable[[], object]]) -> None:
    """On the event loop."""
    for call in calls:
        call()
