"""Requests that arrive whether or not a cell keeps up with them: when their tokens come, in virtual time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from deploy.planning.luck import AcceptanceOf
from deploy.planning.traffic import PlannedRequest
from deploy.planning.virtual_cell import Costs, VirtualCell
from scheduler.config import SchedulerConfig
from scheduler.messages import (
    Command,
    EmitTokens,
    FailSequence,
    FinishSequence,
    RefuseSequence,
    Role,
    SequenceRequest,
    SequenceSubmitted,
)

_WARM_UP = 0.1
"""Of the requests, those that come first: the controller learns what steps cost, and queues are not yet as long as they
will be. They are not counted."""


@dataclass(slots=True)
class RequestTimes:
    """What became of a request; seconds of the virtual clock."""

    arrival: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    failed: bool = False

    @property
    def first_token_seconds(self) -> float:
        return self.first - self.arrival

    @property
    def token_seconds(self) -> float:
        """Mean of the tokens after the first; 0 where there is none."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0


class OpenLoop(VirtualCell):
    """A cell under the load of some requests. `times` are in their order.

    A gateway takes `gateway_seconds` for each request, and for each message of an answer; the cell has one gateway.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        costs: Costs,
        acceptance: AcceptanceOf,
        requests: Sequence[PlannedRequest],
        gateway_seconds: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(config, costs, acceptance, seed)
        self.times = [RequestTimes(request.arrival) for request in requests]
        self.verified = 0
        self._requests = requests
        self._gateway_seconds = gateway_seconds
        self._gateway_free = 0.0
        self._open = len(requests)
        for number, request in enumerate(requests):
            self.at(request.arrival, partial(self._arrive_at_gateway, number))

    def run_all(self) -> None:
        """Until all requests have ended."""
        self.run(lambda: not self._open)

    def _through_gateway(self) -> float:
        """When the gateway is done with what it gets now."""
        self._gateway_free = max(self._gateway_free, self.now) + self._gateway_seconds
        return self._gateway_free

    def _arrive_at_gateway(self, number: int) -> None:
        request = self._requests[number]
        sequence = SequenceRequest(number, request.prompt(number), request.output_tokens)
        self.at(self._through_gateway(), lambda: self.tell(SequenceSubmitted(sequence)))

    def delivered(self, command: Command) -> None:
        match command:
            case EmitTokens():
                times, came = self.times[command.sequence_id], self._through_gateway()
                times.first = times.first or came
                times.last = came
                times.tokens += len(command.tokens)
                self.verified += 1
            case FinishSequence():
                self._open -= 1
            case FailSequence() | RefuseSequence():
                self.times[command.sequence_id].failed = True
                self._open -= 1


def join_all(cell: VirtualCell, targets: int, drafts: int, target_pages: int, draft_pages: int) -> None:
    for number in range(targets):
        cell.join(f"target{number}", Role.TARGET, pages=target_pages)
    for number in range(drafts):
        cell.join(f"draft{number}", Role.DRAFT, pages=draft_pages, model="draft")


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """What a load was given. Latencies by percentile, in seconds; `token` is a request's mean after its first token.

    `tokens_per_second`: from the first arrival to the last token. The last four are not known of real requests.
    """

    requests: int
    failed: int
    tokens_per_second: float
    first_token: dict[str, float]
    token: dict[str, float]
    target_busy: float = 0.0
    draft_busy: float = 0.0
    tokens_per_round: float = 0.0
    draft_length: float = 0.0

    def keeps(self, first_token_seconds: float, token_seconds: float, percentile: float) -> bool:
        """Whether so many percent of the requests had both, which must be one of the percentiles here."""
        name = percentile_name(percentile)
        return not self.failed and self.first_token[name] <= first_token_seconds and self.token[name] <= token_seconds


def percentile_name(percent: float) -> str:
    return f"p{percent:g}"


def figures(cells: Sequence[OpenLoop], percentiles: Iterable[float] = ()) -> LoadFigures:
    """Of all the requests of these cells, which had them dealt out."""
    times = sorted((one for cell in cells for one in cell.times), key=lambda one: one.arrival)
    known = summarised(times, percentiles)
    seconds = _span(times)
    busy: dict[Role, list[float]] = {Role.TARGET: [], Role.DRAFT: []}
    lengths: dict[int, int] = {}
    for cell in cells:
        for worker in cell.workers.values():
            busy[worker.spec.role].append(worker.busy_seconds / seconds)
        for length, count in cell.core.snapshot().draft_lengths.items():
            lengths[length] = lengths.get(length, 0) + count
    rounds = sum(cell.verified for cell in cells)
    return replace(
        known,
        target_busy=float(np.mean(busy[Role.TARGET])),
        draft_busy=float(np.mean(busy[Role.DRAFT])) if busy[Role.DRAFT] else 0.0,
        tokens_per_round=sum(one.tokens for one in times) / max(1, rounds),
        draft_length=sum(length * count for length, count in lengths.items()) / max(1, sum(lengths.values())),
    )


def summarised(times: Sequence[RequestTimes], percentiles: Iterable[float] = ()) -> LoadFigures:
    """Of requests in the order of their arrival. The percentiles are 50, 99 and these."""
    counted = [one for one in times[int(len(times) * _WARM_UP) :] if not one.failed]
    names = sorted({50.0, 99.0, *percentiles})
    return LoadFigures(
        requests=len(times),
        failed=sum(one.failed for one in times),
        tokens_per_second=sum(one.tokens for one in times) / _span(times),
        first_token=_percentiles([one.first_token_seconds for one in counted], names),
        token=_percentiles([one.token_seconds for one in counted if one.tokens > 1], names),
    )


def _span(times: Sequence[RequestTimes]) -> float:
    """Seconds from the first arrival to the last token; hardly any where no request got one."""
    return max(1e-9, max(one.last for one in times) - times[0].arrival)


def _percentiles(values: Sequence[float], names: Iterable[float]) -> dict[str, float]:
    return {percentile_name(name): float(np.percentile(values, name)) if values else 0.0 for name in names}
