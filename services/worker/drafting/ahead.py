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
from dataclasses import dataclass, field

from engine.drafting.model_drafting import ModelDrafting
from engine.kv.pages import PagePool
from engine.steps import Interrupted
from protos import draft_pb2
from scheduler.speculation.cost_model import TOKEN_SHARE, LinearCost
from services.worker.drafting.drafted_sequence import DraftedSequence, Guess, Path, Work
from services.worker.drafting.limits import MAX_GUESSES
from services.worker.drafting.messages import Verdict
from services.worker.drafting.target_stream import TargetStream

_FEWEST = 2
"""Tokens of a proposal that are worth a pass for the one before them."""

Found = defaultdict[TargetStream, draft_pb2.Proposals]
"""What is proposed ahead, by target."""


@dataclass(slots=True)
class _Step:
    """What is computed ahead in one step, and the pages and time that it takes."""

    asked: list[tuple[DraftedSequence, Guess]] = field(default_factory=list)
    pages: int = 0
    work: Work = field(default_factory=Work)

    def add(self, one: DraftedSequence, guess: Guess, pages: int, free: int) -> bool:
        """Whether there are pages for it."""
        if self.pages + pages > free:
            return False
        self.asked.append((one, guess))
        self.pages += pages
        self.work.add(guess.path, guess.end)
        return True


class Ahead:
    """Of all sequences of a draft worker.

    It goes as far as that ends before the verdict, by what the target's steps and such passes take. Rejections, whose
    paths share the full pages of what was committed, come after all acceptances.
    """

    def __init__(self, drafting: ModelDrafting, pool: PagePool) -> None:
        self._drafting = drafting
        self._pool = pool
        self._going: dict[DraftedSequence, TargetStream] = {}
        """Those for which something is to be computed, the latest verdict last."""
        self._sent: dict[DraftedSequence, float] = {}
        """When the target got the proposal that it verifies."""
        # Of a step, by passes and tokens fed. Tokens cost nothing until they were seen to.
        self._cost = LinearCost((1.0, 0.0), (1.0, TOKEN_SHARE))

    def __len__(self) -> int:
        """Sequences for which there is something to compute."""
        return len(self._going)

    def begin(self, one: DraftedSequence, stream: TargetStream, found: Found) -> bool:
        """Behind a proposal that is sent, if it is whole. Not behind a single token: who asks for that wants to know
        what it costs. Sequences with grammars wait for their verdicts."""
        if len(one.path) < one.end or one.draft_length < 2 or one.sampling.grammar is not None:
            return False
        one.proposed = one.end
        # The target may have gone on without the proposal, and most likely with its first token then.
        self._tell(one, Guess(one.path, one.committed + 1, one.end), stream, found)
        return self._go(one, stream)

    def go_with(self, one: DraftedSequence, stream: TargetStream) -> bool:
        """Behind a verdict for which nothing is proposed, as the target has gone on: its step does not wait."""
        if one.draft_length < 2 or one.sampling.grammar is not None:
            return False
        one.proposed = one.committed
        return self._go(one, stream)

    def stop(self, one: DraftedSequence) -> None:
        """Nothing is known of the sequence beyond its last verdict."""
        self._going.pop(one, None)
        self._sent.pop(one, None)
        for guess in one.guesses.values():
            _drop(guess, one.path)
        one.guesses.clear()
        one.path.cut(one.committed)

    def meet(self, one: DraftedSequence, stream: TargetStream, verdict: Verdict) -> Guess | None:
        """What was computed ahead for the verdict, which holds from now on, and behind which it goes on; None: nothing,
        and all that was is forgotten."""
        guess, path = one.guesses.get(verdict.digest), one.path
        if guess is None and one.committed < verdict.length <= len(path):
            # No proposal was sent for it, but its tokens are there.
            right = path.tokens.digest(verdict.length) == verdict.digest
            guess = Guess(path, verdict.length, len(path)) if right else None
        if guess is None or guess.start != verdict.length or not verdict.draft_length:
            self.stop(one)
            return None
        for digest, other in [*one.guesses.items()]:
            if guess.path is not path or other.start <= guess.start:
                _drop(one.guesses.pop(digest), path, guess.path)
        if guess.path is not path:
            path.kv.drop()
            one.path = guess.path
        one.committed, one.draft_length = guess.start, verdict.draft_length
        one.proposed = guess.start + min(len(guess), one.draft_length) * guess.sent
        self._going.pop(one, None)
        if guess.sent:
            self._go(one, stream)
        return guess

    def go_on(self, interrupted: Interrupted) -> Found:
        """Computes what is missing, unless it is `interrupted`; gives what is complete."""
        began, step = time.monotonic(), self._chosen()
        asked = [one.ask(guess.path, guess.end, True) for one, guess in step.asked]
        answers = self._drafting.propose(asked, interrupted=interrupted)
        found: Found = defaultdict(draft_pb2.Proposals)
        unfinished = set()
        for (one, guess), answer in zip(step.asked, answers, strict=True):
            if one not in self._going:
                continue
            path = guess.path
            path.grow(answer)
            if len(path) >= guess.end:
                self._tell(one, guess, self._going[one], found)
            elif answer.tokens or answer.behind:
                unfinished.add(one)
            elif path is one.path:
                self.stop(one)
            else:
                _drop(one.guesses.pop(path.tokens.digest(guess.start)), one.path)
        for one in [*self._going]:
            if one not in unfinished:
                del self._going[one]
        for stream, proposals in found.items():
            proposals.goes_on = stream in self._going.values()
        if asked and not interrupted():
            self.took(time.monotonic() - began, step.work)
        return found

    def took(self, seconds: float, work: Work) -> None:
        """A step of the draft, whether ahead or not."""
        self._cost.observe(seconds, work.passes, work.tokens)

    def _go(self, one: DraftedSequence, stream: TargetStream) -> bool:
        if one.proposed + 1 + one.draft_length > self._drafting.description.max_sequence_length:
            return False
        self._sent[one] = time.monotonic()
        self._going[one] = stream
        return True

    def _chosen(self) -> _Step:
        step, latest_first = _Step(), [*reversed(self._going)]
        of_pass = self._cost.predict(1, len(latest_first))
        for one in latest_first:
            start, most = one.proposed + 1, one.draft_length
            if of_pass:
                # A pass less than there is time for, since verdict and proposals have a way to go.
                most = min(most, len(one.path) + int(self._left(one) / of_pass) - 1 - start)
            guess = Guess(one.path, start, start + most)
            pages = self._pool.missing(one.path.kv.table, guess.end)
            if most < _FEWEST:
                del self._going[one]
            elif len(one.path) < guess.end and not step.add(one, guess, pages, self._pool.free_pages):
                self.stop(one)
        for place in range(max((one.draft_length for one in self._going), default=0)):
            for one in latest_first:
                at = one.committed + place
                other = one.path.alternatives.get(at, -1)
                if one in self._going and at < one.proposed and other >= 0:
                    self._reject(one, at, other, step)
        return step

    def _reject(self, one: DraftedSequence, at: int, other: int, step: _Step) -> None:
        """Adds the path with the `other` token at this position, where that is not sent yet and fits into the time."""
        digest = one.path.tokens.digest_with([other], at)
        guess = one.guesses.get(digest)
        if guess is None and len(one.guesses) < MAX_GUESSES // 2:
            shared = one.committed - one.committed % self._pool.border
            read, missing, first = at + 1 - shared, one.draft_length, at + 1
        elif guess is not None and not guess.sent:
            shared, first = guess.path.kv.table.length, guess.start
            read, missing = len(guess.path) - shared, guess.end - len(guess.path)
        else:
            return
        passes, tokens = max(step.work.passes, missing), step.work.tokens + read + missing - 1
        if self._cost.predict(1 + passes, tokens) > self._left(one):
            return
        if guess is None:
            guess = Guess(one.path.fork(self._pool, at, other, shared), first, first + missing)
        pages = self._pool.missing(guess.path.kv.table, guess.end)
        if guess.path.kv.table.length >= shared and step.add(one, guess, pages, self._pool.free_pages):
            one.guesses[digest] = guess
        else:
            one.guesses.pop(digest, None)
            guess.path.kv.drop()

    def _left(self, one: DraftedSequence) -> float:
        """Seconds until the step of the target ends that verifies the proposal."""
        return self._going[one].step.seconds - (time.monotonic() - self._sent[one])

    def _tell(self, one: DraftedSequence, guess: Guess, stream: TargetStream, found: Found) -> None:
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


def _drop(guess: Guess, *kept: Path) -> None:
    """Frees what a guess holds, unless its path is kept."""
    if guess.path not in kept:
        guess.path.kv.drop()
