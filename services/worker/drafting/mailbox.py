"""What a target keeps of the sequences that a draft worker proposes for: what the draft knows of them, its answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spool.engine.drafting.proposer import Asked
from spool.scheduler.messages import DraftingReport
from spool.scheduler.speculation.cost_model import MeanSeconds
from spool.services.worker.drafting.limits import MAX_GUESSES, check_at_most
from spool.services.worker.drafting.messages import Answer
from spool.services.worker.drafting.patience import Patience

_OWING = 2
"""Draft workers in a row that the target has left while they owed an answer for a sequence, before no other one is
asked for it."""


@dataclass(slots=True)
class RemoteSequence:
    """The draft has been `sent` the first so many tokens on the present stream; 0: the sequence must be opened.

    The latest request asked for at most `most` tokens after the prefix with the digest `asked`. Once it is `answered`,
    `tokens` are what is proposed. The `guesses` were proposed ahead, by the digest of the prefix that they follow.
    `ahead`: one of them is what is proposed. `met`: the draft has proposed for the sequence and has little to read for
    the next proposal, so that steps wait for it. `going_on`: it computes ahead, as it has before and `survived`.
    `owed`: a stream broke while an answer was due, if only to say that KV is there, or while the draft was ahead;
    `owing` counts the drafts that the target has left so, in a row.
    """

    sent: int = 0
    asked: int | None = None
    most: int = 0
    answered: bool = True
    tokens: Sequence[int] = ()
    guesses: dict[int, Sequence[int]] = field(default_factory=dict)
    met: bool = False
    going_on: bool = False
    survived: bool = False
    ahead: bool = False
    owed: bool = False
    owing: int = 0
    refused: bool = False

    @property
    def in_time(self) -> bool:
        return self.answered and self.most > 0

    def ask(self, digest: int, most: int) -> None:
        """What was proposed ahead is there at once, and the draft goes on behind it."""
        self.asked, self.most = digest, most
        self.tokens = self.guesses.pop(digest, ())[:most]
        self.answered = self.going_on = self.ahead = bool(self.tokens)
        self.met = self.met or self.answered

    def take_in(self, answer: Answer) -> bool:
        """Whether it is the answer to the latest request; to another one, it is late and of no use. Raises
        BadMessageError."""
        self.going_on = answer.goes_on
        if answer.tokens:
            self.met = True
            if answer.ahead or self.survived or not self.going_on:
                self.owing = 0
            self.survived = True
        if answer.digest != self.asked:
            if answer.ahead:
                self.guesses[answer.digest] = answer.tokens
                if len(self.guesses) > MAX_GUESSES:
                    del self.guesses[next(iter(self.guesses))]
            return False
        if answer.ahead:
            answer.tokens = answer.tokens[: self.most]
        name = f"the number of tokens for sequence {answer.sequence_id}"
        check_at_most(name, len(answer.tokens), self.most)
        self.answered = True
        if self.most:
            self.tokens, self.met = answer.tokens, True
        return not answer.ahead

    def forget_stream(self) -> None:
        """The draft of the next stream knows nothing of the sequence."""
        self.sent, self.asked, self.answered, self.tokens, self.met = 0, None, True, (), False
        self.guesses, self.going_on, self.survived = {}, False, False


class Mailbox:
    """Requests and answers of one target's sequences, by sequence and digest. Holds no more than the latest of each.

    The worker's step thread asks, waits and takes, and the thread of the stream delivers; `lock` is held by either for
    as long as it touches sequences.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.sequences: dict[int, RemoteSequence] = {}
        self.connected = False
        self.patience = Patience()
        self._report = DraftingReport()
        self._refused: list[int] = []
        self.asked_at = 0.0
        """The time of the latest request."""
        self._drafting = MeanSeconds()
        """From a request to its answer."""

    def granted(self) -> None:
        """Another draft worker serves the target. The one before may have died of a sequence for which it owes an
        answer, or is going to, whatever the other one was granted for."""
        for sequence_id, one in self.sequences.items():
            one.owing += one.owed
            one.owed = False
            if one.owing >= _OWING:
                self._refuse(sequence_id, one)

    def open(self) -> None:
        """A stream is there: so the draft worker lives, whatever has broken the stream before."""
        self.connected, self.patience = True, Patience()
        for one in self.sequences.values():
            one.owed = False

    def close(self) -> None:
        """The stream is no more."""
        self.connected = False
        for one in self.sequences.values():
            one.owed = one.owed or not one.answered or one.going_on
            one.forget_stream()
        self.lock.notify_all()

    def deliver(self, answers: Sequence[Answer], unknown: Iterable[int], refused: Iterable[int]) -> None:
        """Raises BadMessageError."""
        answered = False
        for answer in answers:
            if (one := self.sequences.get(answer.sequence_id)) is not None:
                answered |= one.take_in(answer)
        if answered:
            self._drafting.observe(time.monotonic() - self.asked_at)
        for sequence_id in unknown:
            if (one := self.sequences.get(sequence_id)) is not None:
                one.forget_stream()
        for sequence_id in refused:
            if (one := self.sequences.get(sequence_id)) is not None:
                self._refuse(sequence_id, one)
        self.lock.notify_all()

    def take(self, asked: Sequence[Asked], wait_seconds: float) -> list[Sequence[int]]:
        """The proposals that are there. If there is none, waits for the first of sequences for which the draft has
        proposed before. A draft that has guessed some verdicts of a step sends nothing for its other sequences until
        the next (ahead.py), so the step does not wait for those."""
        with self.lock:
            found = [self._find(one) for one in asked]
            met = [one for one in found if one is not None and one.met]
            waits = wait_seconds > 0 and any(one.most for one in met)
            if waits:
                self._wait(met, time.monotonic() + wait_seconds)
            # The draft may have lost or refused some meanwhile: no answer of theirs is due any more.
            met = [one for one in met if one.asked is not None]
            in_time = sum(one.in_time for one in met)
            if waits and met:
                self.patience.waited(in_time > 0)
            self._report.asked += sum(one.most > 0 for one in met)
            self._report.in_time += in_time
            if ahead := sum(one.ahead and one.in_time for one in met):
                self._report.ahead += ahead
                self._report.hidden_seconds += self._drafting.seconds
            return [() if one is None else one.tokens[: ask.most] for one, ask in zip(found, asked, strict=True)]

    def report(self, connected: bool) -> DraftingReport:
        """Since it was asked last, as it is after each step."""
        with self.lock:
            self.patience.step()
            report, self._report = self._report, DraftingReport()
            report.connected, report.refused = connected, tuple(self._refused)
            self._refused.clear()
        return report

    def _find(self, asked: Asked) -> RemoteSequence | None:
        one = self.sequences.get(asked.drafting.sequence_id)
        return one if one is not None and one.asked == asked.digest and asked.most else None

    def _wait(self, met: Sequence[RemoteSequence], until: float) -> None:
        while self.connected and not any(one.in_time for one in met):
            left = until - time.monotonic()
            if left <= 0 or not self.lock.wait(left):
                return

    def _refuse(self, sequence_id: int, one: RemoteSequence) -> None:
        one.forget_stream()
        if not one.refused:
            one.refused = True
            self._refused.append(sequence_id)
