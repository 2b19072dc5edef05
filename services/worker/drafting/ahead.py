"""Proposals before they are asked for, while targets verify the ones before.

Where a draft has nothing else to do, it goes on behind each proposal for the verdicts that are likely: that all of it
is accepted and the token follows that the draft would choose next; and that a token of it is rejected for the one that
the draft would have chosen in its place, an early one rather than a late one. If the verdict is among these, the next
proposal has been at the target before it (as in SSD, arXiv 2603.03251); if not, nothing but the draft's idle time is
lost. With the target's sampling parameters and noise, what the draft would choose is a sample as the target's is.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from spool.engine.drafting.model_drafting import DraftAnswer, DraftAsk, ModelDrafting
from spool.engine.kv.pages import PagePool
from spool.engine.steps import Interrupted
from spool.protos import draft_pb2
from spool.scheduler.speculation.cost_model import TOKEN_SHARE, LinearCost
from spool.services.worker.drafting.drafted_sequence import DraftedSequence, Guess, Path, Work
from spool.services.worker.drafting.limits import MAX_DRAFT_LENGTH, MAX_GUESSES
from spool.services.worker.drafting.messages import Verdict
from spool.services.worker.drafting.target_stream import TargetStream

_MIN_PROPOSED = 2
"""A proposal of fewer tokens is not worth the pass for the token before it."""

ProposalsByTarget = defaultdict[TargetStream, draft_pb2.Proposals]


@dataclass(slots=True)
class AheadStep:
    """The guesses that one step of the draft computes. `pages` and `work` are those of the whole step, requests beside
    the guesses included. No guess takes more than `most_passes`."""

    pages: int = 0
    work: Work = field(default_factory=Work)
    most_passes: int = MAX_DRAFT_LENGTH + 1
    asked: list[tuple[DraftedSequence, Guess]] = field(default_factory=list)

    def add(self, one: DraftedSequence, guess: Guess, pages: int, free: int) -> bool:
        """Returns False if there are no pages for it."""
        if self.pages + pages > free:
            return False
        self.asked.append((one, guess))
        self.pages += pages
        self.work.add(guess.path, guess.end)
        return True

    def requests(self) -> list[DraftAsk]:
        return [one.request(guess.path, guess.end, True) for one, guess in self.asked]


class Ahead:
    """Computes guesses for the sequences of a draft worker.

    A step takes on what ends before the verdicts, by the measured times of the target's steps and of the draft's own
    passes. Rejections, whose paths share the full pages of what is committed, come after all acceptances.
    """

    def __init__(self, drafting: ModelDrafting, pool: PagePool) -> None:
        self._drafting = drafting
        self._pool = pool
        self._open: dict[DraftedSequence, TargetStream] = {}
        """Sequences with something left to compute, the latest verdict last."""
        self._started: dict[DraftedSequence, float] = {}
        """When the target began the step whose verdict comes next."""
        # Of a step, by passes and tokens fed. Tokens cost nothing until they were seen to.
        self._cost = LinearCost((1.0, 0.0), (1.0, TOKEN_SHARE))

    def __len__(self) -> int:
        """Sequences with something left to compute."""
        return len(self._open)

    def start_after_proposal(self, one: DraftedSequence, stream: TargetStream, found: ProposalsByTarget) -> bool:
        """After a whole proposal that was just sent. Returns whether there is something to compute."""
        if len(one.path) < one.end or not _may_start(one):
            return False
        one.proposed = one.end
        # If the target went on without the proposal, its first token most likely comes next.
        self._publish(one, Guess(one.path, one.committed + 1, one.end), stream, found)
        return self._start(one, stream)

    def start_after_plain_step(self, one: DraftedSequence, stream: TargetStream) -> bool:
        """After a verdict without a proposal, for a step that goes on without it. Returns as `start_after_proposal`."""
        if not _may_start(one):
            return False
        one.proposed = one.committed
        return self._start(one, stream)

    def discard(self, one: DraftedSequence) -> None:
        """Forgets everything beyond the sequence's last verdict."""
        self._open.pop(one, None)
        self._started.pop(one, None)
        for guess in one.guesses.values():
            _release(guess, one.path)
        one.guesses.clear()
        one.path.truncate(one.committed)

    def match(self, one: DraftedSequence, stream: TargetStream, verdict: Verdict) -> Guess | None:
        """The guess that the verdict confirms, from which the sequence goes on; None if there is none, and all that was
        computed ahead is discarded."""
        guess, path = one.guesses.get(verdict.digest), one.path
        if guess is None and one.committed < verdict.length <= len(path):
            # Nothing was sent for it, but the path leads there.
            right = path.tokens.digest(verdict.length) == verdict.digest
            guess = Guess(path, verdict.length, len(path)) if right else None
        if guess is None or guess.start != verdict.length or not verdict.draft_length:
            self.discard(one)
            return None
        for digest, other in [*one.guesses.items()]:
            if guess.path is not path or other.start <= guess.start:
                _release(one.guesses.pop(digest), path, guess.path)
        if guess.path is not path:
            path.kv.drop()
            one.path = guess.path
        one.committed, one.draft_length = guess.start, verdict.draft_length
        one.proposed = guess.start + min(len(guess), one.draft_length) * guess.sent
        self._open.pop(one, None)
        if guess.sent:
            self._start(one, stream)
        return guess

    def compute(self, interrupted: Interrupted) -> ProposalsByTarget:
        """One step of the draft, unless it is `interrupted`. Returns the proposals that are complete."""
        began, step = time.monotonic(), AheadStep()
        self.fill(step)
        answers = self._drafting.propose(step.requests(), interrupted=interrupted)
        found: ProposalsByTarget = defaultdict(draft_pb2.Proposals)
        unfinished = self.take(step, answers, found)
        for one in [*self._open]:
            if one not in unfinished:
                del self._open[one]
        for stream, proposals in found.items():
            proposals.goes_on = stream in self._open.values()
        if answers and not interrupted():
            self.observe_step(time.monotonic() - began, step.work)
        return found

    def take(self, step: AheadStep, answers: Sequence[DraftAnswer], found: ProposalsByTarget) -> set[DraftedSequence]:
        """Takes in the answers to the requests of a step, and adds the proposals that are complete. Returns the
        sequences whose are not."""
        unfinished: set[DraftedSequence] = set()
        for (one, guess), answer in zip(step.asked, answers, strict=True):
            if one not in self._open:
                continue
            path = guess.path
            path.extend(answer)
            if len(path) >= guess.end:
                self._publish(one, guess, self._open[one], found)
            elif answer.tokens or answer.behind:
                unfinished.add(one)
                if len(path) >= guess.start + _MIN_PROPOSED:
                    # The verdict may be there before the rest is, which comes after what has interrupted the step.
                    self._publish(one, replace(guess, end=len(path)), self._open[one], found)
            elif path is one.path:
                self.discard(one)
            else:
                _release(one.guesses.pop(path.tokens.digest(guess.start)), one.path)
        return unfinished

    def observe_step(self, seconds: float, work: Work) -> None:
        """Learns what a step of the draft costs, whether it was ahead or not."""
        self._cost.observe(seconds, work.passes, work.tokens)

    def _start(self, one: DraftedSequence, stream: TargetStream) -> bool:
        if one.proposed + 1 + one.draft_length > self._drafting.description.max_sequence_length:
            return False
        self._started[one] = time.monotonic()
        self._open[one] = stream
        return True

    def fill(self, step: AheadStep) -> None:
        """Adds the guesses that there is time for."""
        latest_first = [*reversed(self._open)]
        of_pass = self._cost.predict(1, len(latest_first))
        for one in latest_first:
            start, most = one.proposed + 1, one.draft_length
            if of_pass:
                # One pass is left out, for the time that verdicts and proposals are on their way.
                most = min(most, len(one.path) + int(self._seconds_left(one) / of_pass) - 1 - start)
            if most < _MIN_PROPOSED:
                del self._open[one]
                continue
            most = min(most, len(one.path) + step.most_passes - start)
            guess = Guess(one.path, start, start + most)
            pages = self._pool.missing(one.path.kv.table, guess.end)
            if most < _MIN_PROPOSED:
                continue
            if len(one.path) < guess.end and not step.add(one, guess, pages, self._pool.free_pages):
                self.discard(one)
        for place in range(max((one.draft_length for one in self._open), default=0)):
            for one in latest_first:
                at = one.committed + place
                other = one.path.alternatives.get(at, -1)
                if one in self._open and at < one.proposed and other >= 0:
                    self._add_rejection(one, at, other, step)

    def _add_rejection(self, one: DraftedSequence, at: int, other: int, step: AheadStep) -> None:
        """Adds the path with the `other` token at this position, unless it was sent before or takes too long."""
        digest = one.path.tokens.digest_with([other], at)
        guess = one.guesses.get(digest)
        if guess is None and len(one.guesses) < MAX_GUESSES // 2:
            shared = one.committed - one.committed % self._pool.border
            read, missing, first = at + 1 - shared, min(one.draft_length, step.most_passes), at + 1
        elif guess is not None and not guess.sent:
            shared, first = guess.path.kv.table.length, guess.start
            read, missing = len(guess.path) - shared, guess.end - len(guess.path)
        else:
            return
        passes, tokens = max(step.work.passes, missing), step.work.tokens + read + missing - 1
        if missing > step.most_passes or self._cost.predict(1 + passes, tokens) > self._seconds_left(one):
            return
        if guess is None:
            guess = Guess(one.path.fork(self._pool, at, other, shared), first, first + missing)
        pages = self._pool.missing(guess.path.kv.table, guess.end)
        if guess.path.kv.table.length >= shared and step.add(one, guess, pages, self._pool.free_pages):
            one.guesses[digest] = guess
        else:
            one.guesses.pop(digest, None)
            guess.path.kv.drop()

    def _seconds_left(self, one: DraftedSequence) -> float:
        """Until the target's step ends."""
        return self._open[one].step.seconds - (time.monotonic() - self._started[one])

    def _publish(self, one: DraftedSequence, guess: Guess, stream: TargetStream, found: ProposalsByTarget) -> None:
        tokens = guess.path.tokens
        digest, proposal = tokens.digest(guess.start), tokens.tokens[guess.start : guess.end]
        guess.sent = True
        one.guesses[digest] = guess
        proposals = found[stream]
        proposals.ahead = proposals.goes_on = True
        proposals.sequence_ids.append(one.sequence_id)
        proposals.digests.append(digest)
        proposals.counts.append(len(proposal))
        proposals.tokens.extend(proposal)


def _may_start(one: DraftedSequence) -> bool:
    """Not after a single token, which is asked for to learn what it costs; sequences with grammars wait for their
    verdicts."""
    return one.draft_length >= _MIN_PROPOSED and one.sampling.grammar is None


def _release(guess: Guess, *kept: Path) -> None:
    """Frees the pages of a guess, unless its path is kept."""
    if guess.path not in kept:
        guess.path.kv.drop()
