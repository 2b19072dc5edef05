"""Requests of several API keys on a cell with known costs, in virtual time: when each gets its first token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from deploy.planning.virtual_cell import Costs, VirtualCell
from scheduler.config import SchedulerConfig
from scheduler.messages import (
    Command,
    EmitTokens,
    FailSequence,
    FinishSequence,
    RefuseSequence,
    SequenceRequest,
    SequenceSubmitted,
)


class KeyedLoad(VirtualCell):
    """`waits` has the seconds to the first token of every request that got one, by key."""

    def __init__(self, config: SchedulerConfig, costs: Costs) -> None:
        super().__init__(config, costs, lambda _id, _position: 0.7)
        self.waits: dict[str, list[float]] = {}
        self.tokens: Counter[str] = Counter()
        self._last_id = -1
        self._asked: dict[int, tuple[str, float]] = {}
        self._waiting: dict[int, None] = {}
        self._then: dict[int, Callable[[], None]] = {}

    def ask(self, time: float, key: str, prompt: int, output: int, then: Callable[[], None] | None = None) -> None:
        """A request at this time; `then` is called at its end."""

        def submit() -> None:
            sequence_id = self._last_id = self._last_id + 1
            self._asked[sequence_id] = key, self.now
            self._waiting[sequence_id] = None
            if then is not None:
                self._then[sequence_id] = then
            request = SequenceRequest(sequence_id, (sequence_id + 1,) * prompt, output, key=key)
            self.tell(SequenceSubmitted(request))

        self.at(time, submit)

    def flood(self, time: float, key: str, streams: int, prompt: int, output: int) -> None:
        """So many requests from this time on, always: a new one for each that ends."""
        for _ in range(streams):
            self.ask(time, key, prompt, output, lambda: self.flood(self.now, key, 1, prompt, output))

    def run_for(self, seconds: float) -> None:
        ended: list[None] = []
        self.at(self.now + seconds, lambda: ended.append(None))
        self.run(lambda: bool(ended))

    def delivered(self, command: Command) -> None:
        match command:
            case EmitTokens():
                key, asked = self._asked[command.sequence_id]
                self.tokens[key] += len(command.tokens)
                if command.sequence_id in self._waiting:
                    del self._waiting[command.sequence_id]
                    self.waits.setdefault(key, []).append(self.now - asked)
            case FinishSequence():
                then = self._then.pop(command.sequence_id, None)
                if then is not None:
                    then()
            case FailSequence() | RefuseSequence():
                raise AssertionError(command)
