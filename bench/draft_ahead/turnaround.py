"""How long a verdict waits for the next verification: from its bytes to those of the step that follows, by parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import grpc.aio

from bench.draft_ahead.laws import LAWS, LONGEST, OUTCOMES, PACED
from bench.draft_ahead.streams import one_at_a_time
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import Role, RowResult, SendStep
from services.launch.launcher import WorkerLaunch
from services.observability.observer import ServiceObserver, StepTimings
from services.rpc.channel_security import ChannelSecurity

_LAW, _AGREEMENT = "8B, 0.6B", 0.7
_PARTS = ("reading", "telling", "applying", "delivering", "planning", "writing")
"""Bytes to the core's own messages; observers; the core's two calls; output to its stream; the step to bytes."""


class TimedSecurity(ChannelSecurity):
    """Channels that note when the bytes of a step's answer are read, and when those of a step are written."""

    clock: Turnarounds

    def __init__(self, clock: Turnarounds) -> None:
        super().__init__()
        object.__setattr__(self, "clock", clock)  # the class is frozen

    def open_channel(self, address: str, silence_seconds: float | None = None) -> grpc.aio.Channel:
        return _TimedChannel(super().open_channel(address, silence_seconds), self.clock)  # type: ignore[return-value]


class _TimedChannel:
    def __init__(self, channel: grpc.aio.Channel, clock: Turnarounds) -> None:
        self._channel, self._clock = channel, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **options: Any) -> Any:
        def write(step: Any) -> bytes:
            data: bytes = request_serializer(step)
            self._clock.written(step.step_id)
            return data

        def read(data: bytes) -> Any:
            self._clock.arrived_at = time.perf_counter()
            return response_deserializer(data)

        return self._channel.stream_stream(method, write, read, **options)


@dataclass
class Turnarounds(ServiceObserver):
    """Of each verdict with whose bytes the next verification could be written without a draft's answer in between."""

    arrived_at: float = 0.0
    parts: list[dict[str, float]] = field(default_factory=list)
    _marks: list[float] = field(default_factory=list)
    _next: int | None = None

    def step_replied(
        self, role: Role, step: SendStep, results: tuple[RowResult, ...], timings: StepTimings, now: float
    ) -> None:
        self._marks = [self.arrived_at, time.perf_counter()] if role is Role.TARGET else []
        self._next = None

    def core_ran(self, seconds: float) -> None:
        now = time.perf_counter()
        if len(self._marks) in (2, 4):  # applied, planned
            self._marks += [now - seconds, now]

    def step_sent(self, role: Role, step: SendStep, now: float) -> None:
        if role is Role.TARGET and len(self._marks) == 6:
            self._next = step.step_id

    def written(self, step_id: int) -> None:
        if step_id == self._next:
            marks = [*self._marks, time.perf_counter()]
            seconds = [end - begin for begin, end in pairwise(marks)]
            self.parts.append({name: each * 1e6 for name, each in zip(_PARTS, seconds, strict=True)})
            self._next, self._marks = None, []


async def turnarounds(tokens: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Microseconds, of plain decoding and of rounds that were prepared, between steps of paced workers over gRPC."""
    configs = {
        "plain": SchedulerConfig(batch_size=1, max_running=1, policy=Policy.RAGGED, draft_length=0),
        "ahead": SchedulerConfig(batch_size=1, max_running=1, draft_length=LONGEST, draft_ahead=OUTCOMES),
    }
    launches = [
        WorkerLaunch(role, {"costs": asdict(LAWS[_LAW]), "agreement": _AGREEMENT}, threads=1, module=PACED)
        for role in (Role.TARGET, Role.DRAFT)
    ]
    clock = Turnarounds()
    ways = []
    async for name, _ in one_at_a_time(launches, configs, [(1,) * 5] * 2, tokens, TimedSecurity(clock), [clock]):
        totals = sorted(sum(parts.values()) for parts in clock.parts)
        ways.append(
            {
                "way": name,
                "verdicts": len(totals),
                "median": median(totals),
                "p90": quantiles(totals, n=10)[-1],
                "parts": {part: median(one[part] for one in clock.parts) for part in _PARTS},
            }
        )
        clock.parts.clear()
        say(f"{name}: {ways[-1]}")
    return {"law": _LAW, "agreement": _AGREEMENT, "tokens": tokens, "ways": ways}
