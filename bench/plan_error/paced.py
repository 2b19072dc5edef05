"""Workers that keep to a law of costs, like those of an 8B model with a 0.6B draft.

What the wire and the scheduler's own process take is measured before, by plain decoding of one stream and of many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from bench.draft_ahead.laws import LAWS, PACED
from bench.plan_error.errors import errors, shown
from bench.profiling.measured_cell import MeasuredCell
from deploy.offline.cell import launched_cell
from deploy.planning.open_loop import LoadFigures, OpenLoop, RequestTimes, figures, join_all, summarised
from deploy.planning.traffic import Lengths, PlannedRequest, drawn
from deploy.planning.virtual_cell import Costs
from deploy.progress import Reporter
from scheduler.config import SchedulerConfig
from scheduler.messages import Role
from services.backend.interface import GenerationRequest
from services.launch.launcher import WorkerLaunch

LAW, AGREEMENT = "8B, 0.6B", 0.7
RATES = (1.0, 2.0, 4.0, 6.0, 8.0)
_PROMPT, _OUTPUT = Lengths(200, 0.8, 2000), Lengths(120, 0.6, 1000)
_CONFIG = SchedulerConfig(batch_size=32, max_running=64, draft_length=6, prefill_chunk=512, max_queued_sequences=10_000)
_MANY = 32


async def run(
    cell: MeasuredCell, config: SchedulerConfig, requests: Sequence[PlannedRequest], load: int
) -> list[RequestTimes]:
    """Of the load of this number. A prompt's first token is the request's number, by which paced workers and virtual
    ones have the same luck. The others are those of the load: what workers have in their prefix caches from earlier
    loads must not be found."""
    asked = [
        GenerationRequest((number, *(len(requests) + load,) * (one.prompt_tokens - 1)), one.output_tokens)
        for number, one in enumerate(requests)
    ]
    return await cell.run(config, asked, [one.arrival for one in requests])


async def overheads(cell: MeasuredCell, costs: Costs) -> tuple[float, float]:
    """Seconds of a plain step beyond its own: of one row, and for each further row."""
    found = []
    for streams in (1, _MANY):
        config = replace(_CONFIG, batch_size=_MANY, draft_length=0, steps_in_flight=1)
        times = await run(cell, config, [PlannedRequest(0.0, 8, 400) for _ in range(streams)], -streams)
        seconds = sum(one.token_seconds for one in times) / streams
        found.append(seconds - costs.base - costs.row * streams)
    return found[0], max(0.0, (found[1] - found[0]) / (_MANY - 1))


async def compared_paced(requests_each: int, reporter: Reporter) -> dict[str, Any]:
    costs = LAWS[LAW]
    loads: list[dict[str, Any]] = []
    settings = {"costs": asdict(costs), "agreement": AGREEMENT}
    launches = [WorkerLaunch(role, settings, threads=1, module=PACED) for role in (Role.TARGET, Role.DRAFT)]
    async with launched_cell(launches, reporter) as launched:
        cell = MeasuredCell(launched)
        step, row = await overheads(cell, costs)
        reporter.stage(
            "overheads", f"beyond its own time a step takes {step * 1e3:.2f} ms, {row * 1e6:.0f} us a row", 1
        )
        # Half of it is on the wire and in the workers, where steps do not wait for each other.
        known = replace(costs, latency=step / 4, scheduler_step=step / 2, scheduler_row=row)
        for number, rate in enumerate(RATES):
            requests = drawn(rate, requests_each, _PROMPT, _OUTPUT)
            measured = summarised(await run(cell, _CONFIG, requests, number))
            predicted = predict(known, requests)
            error = errors(measured, predicted)
            loads.append({"rate": rate, "measured": asdict(measured), "predicted": asdict(predicted), "error": error})
            reporter.stage(f"{rate:g} a second", shown(error), 1)
    return {
        "law": LAW,
        "agreement": AGREEMENT,
        "requests_each": requests_each,
        "step_overhead_seconds": step,
        "row_overhead_seconds": row,
        "loads": loads,
    }


def predict(costs: Costs, requests: Sequence[PlannedRequest]) -> LoadFigures:
    cell = OpenLoop(_CONFIG, costs, lambda _id, _position: AGREEMENT, requests)
    join_all(cell, 1, 1, 40_000, 40_000)
    cell.run_all()
    return figures([cell])
