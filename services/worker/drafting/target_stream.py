"""One target as its draft worker sees it: its sequences, and what waits in either direction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.drafting.draft_kv import DraftKv
from protos import draft_pb2
from scheduler.sampling import SamplingParameters
from scheduler.state.digests import DigestedTokens
from services.worker.drafting.limits import MAX_OPENED_TOKENS, BadMessageError
from services.worker.drafting.messages import VerdictsOfStep

_WAITING = 64
"""Messages that wait on a stream, in both directions together, before no more are read from it; one that opens as many
tokens as it may counts as that many."""


@dataclass(slots=True, eq=False)
class DraftedSequence:
    """`tokens` begin with the target's, the `committed` ones; behind these are those that the draft has chosen ahead
    (ahead.py), up to a `goal`. Once that is reached, the first `guessed` are the prefix of a proposal that was sent
    ahead; 0: there is none. `draft_length` is of the latest request. `asked` and `asked_before` number the batches for
    which the latest two came, `served` the one that computed for the sequence last; 0: none."""

    sequence_id: int
    prompt_length: int
    sampling: SamplingParameters
    kv: DraftKv
    tokens: DigestedTokens
    committed: int = 0
    goal: int = 0
    guessed: int = 0
    draft_length: int = 0
    asked: int = 0
    asked_before: int = 0
    served: int = 0

    @property
    def lag(self) -> int:
        """How many tokens the draft must read before it can propose, unless other sequences have their KV."""
        return self.committed - min(self.kv.table.length, len(self.kv.known))


@dataclass(eq=False)
class TargetStream:
    """Of the event loop, but for `sequences`, which are the batcher's, on the thread that computes."""

    target_id: str
    free: Callable[[TargetStream], None]
    """Called at its end, however it comes."""
    sequences: dict[int, DraftedSequence] = field(default_factory=dict)
    answers: asyncio.Queue[draft_pb2.Proposals | None] = field(default_factory=asyncio.Queue)
    closed: bool = False
    refusal: BadMessageError | None = None
    frames: asyncio.StreamWriter | None = None
    """Where answers go, instead of the call of gRPC."""
    _arrived: int = 0
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, refusal: BadMessageError | None) -> None:
        """Nothing is taken any more, nor answered after what waits; `refusal` says why, where the target is to know.
        Frees what the stream has even where the target reads nothing."""
        if not self.closed:
            self.closed, self.refusal = True, refusal
            self.answers.put_nowait(None)
            self._moved.set()
            self.free(self)

    async def answer(self) -> draft_pb2.Proposals | None:
        """The next one; None at the end."""
        answer = await self.answers.get()
        self._moved.set()
        return answer

    def note(self, step: VerdictsOfStep, taken: bool) -> None:
        """It has arrived, or the batcher has taken it."""
        weight = 1 + step.size * _WAITING // MAX_OPENED_TOKENS
        self._arrived += -weight if taken else weight
        self._moved.set()

    async def room(self) -> None:
        """Waits until less waits than the limit, or the stream is closed. A target that sends without reading waits
        here."""
        while not self.closed and self._arrived + self.answers.qsize() >= _WAITING:
            self._moved.clear()
            await self._moved.wait()
