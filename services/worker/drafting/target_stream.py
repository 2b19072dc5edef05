"""One target as its draft worker sees it: its sequences, and what waits in either direction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from spool.protos import draft_pb2
from spool.scheduler.speculation.cost_model import MeanSeconds
from spool.services.worker.drafting.drafted_sequence import DraftedSequence
from spool.services.worker.drafting.limits import MAX_OPENED_TOKENS, BadMessageError
from spool.services.worker.drafting.messages import VerdictsOfStep

_WAITING = 64
"""Messages that wait on a stream, in both directions together, before no more are read from it; one that opens as many
tokens as it may counts as that many."""


@dataclass(eq=False)
class TargetStream:
    """Of the event loop, but for `sequences` and `step`, which are the batcher's, on the thread that computes."""

    target_id: str
    free: Callable[[TargetStream], None]
    """Called at its end, however it comes."""
    sequences: dict[int, DraftedSequence] = field(default_factory=dict)
    step: MeanSeconds = field(default_factory=MeanSeconds)
    """How long the target takes for a step."""
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
