"""What `spool plan` predicts, beside what is measured. JSON on the last line.

    python -m bench.record plan_error -- python -m bench.plan_error

Requests arrive at random at a real scheduler, over gRPC to worker processes that keep to a law of costs, like those of
an 8B model with a 0.6B draft; and the same requests in virtual time, with the same costs. What the wire and the
scheduler's own process take is measured before, by plain decoding of one stream and of many.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from bench.draft_ahead.laws import LAWS
from bench.plan_error.measured_cell import MeasuredCell
from deploy.planning.open_loop import LoadFigures, OpenLoop, figures, join_all, summarised
from deploy.planning.traffic import Lengths, PlannedRequest, drawn
from deploy.planning.virtual_cell import Costs
from scheduler.config import SchedulerConfig
from scheduler.messages import Role
from services.launch.launcher import WorkerLaunch, WorkerLauncher

LAW, AGREEMENT = "8B, 0.6B", 0.7
RATES = (1.0, 2.0, 4.0, 6.0, 8.0)
_PROMPT, _OUTPUT = Lengths(200, 0.8, 2000), Lengths(120, 0.6, 1000)
_CONFIG = SchedulerConfig(batch_size=32, max_running=64, draft_length=6, prefill_chunk=512, max_queued_sequences=10_000)
_MODULE = "bench.draft_ahead.paced_worker"
_MANY = 32
_CONSOLE = Console(stderr=True)


async def overheads(cell: MeasuredCell, costs: Costs) -> tuple[float, float]:
    """Seconds of a plain step beyond its own: of one row, and for each further row."""
    found = []
    for streams in (1, _MANY):
        requests = [PlannedRequest(0.0, 8, 400) for _ in range(streams)]
        times = await cell.run(replace(_CONFIG, batch_size=_MANY, draft_length=0, steps_in_flight=1), requests)
        seconds = sum(one.token_seconds for one in times) / streams
        found.append(seconds - costs.base - costs.row * streams)
    return found[0], max(0.0, (found[1] - found[0]) / (_MANY - 1))


async def compared(requests_each: int) -> dict[str, Any]:
    costs = LAWS[LAW]
    loads: list[dict[str, Any]] = []
    launches = [
        WorkerLaunch(role, {"law": LAW, "agreement": AGREEMENT}, threads=1, module=_MODULE)
        for role in (Role.TARGET, Role.DRAFT)
    ]
    async with WorkerLauncher(launches) as launcher:
        cell = MeasuredCell(launcher)
        step, row = await overheads(cell, costs)
        _CONSOLE.print(f"beyond its own time a step takes {step * 1e3:.2f} ms, and {row * 1e6:.0f} us a row")
        # Half of it is on the wire and in the workers, where steps do not wait for each other.
        known = replace(costs, latency=step / 4, scheduler_step=step / 2, scheduler_row=row)
        for rate in RATES:
            requests = drawn(rate, requests_each, _PROMPT, _OUTPUT)
            measured = summarised(await cell.run(_CONFIG, requests))
            predicted = predict(known, requests)
            error = errors(measured, predicted)
            loads.append({"rate": rate, "measured": asdict(measured), "predicted": asdict(predicted), "error": error})
            _CONSOLE.print(f"{rate:g} a second: " + ", ".join(f"{name} {part:+.1%}" for name, part in error.items()))
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


def errors(measured: LoadFigures, predicted: LoadFigures) -> dict[str, float]:
    """Predicted over measured, less one."""
    found = {"tokens/s": predicted.tokens_per_second / measured.tokens_per_second - 1}
    for name in ("p50", "p99"):
        found[f"first token {name}"] = predicted.first_token[name] / measured.first_token[name] - 1
        found[f"token {name}"] = predicted.token[name] / measured.token[name] - 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100, help="of each load")
    print(json.dumps(asyncio.run(compared(parser.parse_args().requests))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
