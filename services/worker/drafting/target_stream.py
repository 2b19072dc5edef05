"""One target as its draft worker sees it: its sequences, and what waits in either direction."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from engine.drafting.draft_kv import DraftKv
from protos import draft_pb2
from scheduler.sampling import SamplingParameters
from scheduler.state.digests import DigestedTokens
from services.worker.drafting.limits import BadMessageError
from services.worker.drafting.messages import VerdictsOfStep

_WAITING = 64
"""Messages that wait on a stream, in both directions together, before no more are read from it."""


@dataclass(slots=True, eq=False)
class DraftedSequence:
    """`draft_length` is of the latest request. `asked` and `asked_before` number the batches for which the latest two
    came, `served` the one that computed for the sequence last; 0: none."""

    sequence_id: int
    prompt_length: int
    sampling: SamplingParameters
    kv: DraftKv
    tokens: DigestedTokens
    draft_length: int = 0
    asked: int = 0
    asked_before: int = 0
    served: int = 0

    @property
    def lag(self) -> int:
        """How many tokens the draft must read before it can propose, unless other sequences have their KV."""
        return len(self.tokens) - min(self.kv.table.length, len(self.kv.known))


@dataclass(eq=False)
class TargetStream:
    """The event loop adds to `arrived` and takes from `answers`, and the batcher does the reverse under its own lock.
    `sequences` are the batcher's, on the thread that computes."""

    target_id: str
    arrived: deque[VerdictsOfStep] = field(default_factory=deque)
    answers: asyncio.Queue[draft_pb2.Proposals | None] = field(default_factory=asyncio.Queue)
    sequences: dict[int, DraftedSequence] = field(default_factory=dict)
    round: int = 0
    closed: bool = False
    refusal: BadMessageError | None = None
    frames: asyncio.StreamWriter | None = None
    """Where answers go, instead of the call of gRPC."""
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, refusal: BadMessageError | None) -> None:
        """Nothing is answered any more; `refusal` says why, where the target is to know."""
        self.refusal = self.refusal or refusal
        self.answers.put_nowait(None)

    async def answer(self) -> draft_pb2.Proposals | None:
        """The next one; None at the end."""
        answer = await self.answers.get()
        self._moved.set()
        return answer

    def note_taken(self) -> None:
        """The batcher has taken what had arrived, or takes no more."""
        self._moved.set()

    async def room(self) -> None:
        """Waits until less waits than the limit, or the stream is closed. A target that sends without reading waits
        here."""
        while not self.closed and len(self.arrived) + self.answers.qsize() >= _WAITING:
            self._moved.clear()
            await self._moved.wait()
