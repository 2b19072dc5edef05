"""A day of 10,000 GPUs in cells, simulated. JSON on the last line.

    python -m bench.record fleet -- python -m bench.fleet

The speeds of targets come from the scheduler's real core in virtual time, demand from public traces, and the numbers
of targets from the real autoscaling decision. One zone is lost for half an hour in the evening. First the fluid is
compared with the core, event by event, in one small cell.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.fleet.check import Phase, compare
from bench.fleet.day import Day, Plan
from bench.fleet.demand import AZURE_CHAT, Demand
from bench.fleet.faults import GPU_FAULTS_PER_HOUR, REPAIR_SECONDS, SCHEDULER_FAULTS_PER_HOUR, SCHEDULER_SECONDS
from bench.fleet.samples import totals_of
from bench.fleet.speeds import ACCEPTANCE, LOADS, Hardware, h100_pair, measured_speeds
from services.scheduler_client.cell_choice import BALANCE

_PEAK_SHARE, _UTILISATION = 0.8, 0.85
"""Of the GPUs, those that the busiest ten minutes need; and of a target's time, what may be used."""
_PHASES = (Phase(30.0, 4.0), Phase(30.0, 8.0), Phase(30.0, 11.0), Phase(30.0, 6.0))
_CHECKED_TARGETS = 4
_CONTEXT = round(AZURE_CHAT.prompt + AZURE_CHAT.output)
"""KV of a sequence on average: of exponential answers, as much is done as is left."""


def simulated(plan: Plan, progress: Progress) -> dict[str, Any]:
    """The record, with the processor's seconds that each part took."""
    hardware = h100_pair()
    began = time.process_time()
    loading = progress.add_task("speeds of targets", total=len(LOADS))
    speeds = measured_speeds(hardware, _CONTEXT, lambda: progress.advance(loading))
    checking = progress.add_task("fluid beside events", total=1)
    measured = time.process_time()
    checks = compare(hardware, speeds, AZURE_CHAT, _PHASES, _CHECKED_TARGETS)
    progress.advance(checking)
    checked = time.process_time()
    rate = speeds.request_rate(plan.token_seconds, AZURE_CHAT.prompt, AZURE_CHAT.output)
    demand = Demand(_PEAK_SHARE * plan.cells * plan.targets * _UTILISATION * rate)
    day = Day(plan, speeds, demand, AZURE_CHAT, hardware.target.kv_tokens)
    playing = progress.add_task("the day", total=plan.seconds)
    day.run(lambda seconds: progress.update(playing, completed=seconds))
    played = time.process_time()
    return {
        "plan": asdict(plan) | {"gpus": plan.gpus, "targets_per_cell": plan.targets},
        "lengths": asdict(AZURE_CHAT),
        "assumed": _assumed(hardware),
        "peak_requests_per_second": round(demand.peak),
        "requests_per_target": round(rate, 3),
        "speeds": [totals_of(asdict(load)) for load in speeds.loads],
        "check": {"targets": _CHECKED_TARGETS, "phases": [_checked(asdict(one), one.error) for one in checks]},
        "totals": totals_of(asdict(day.totals) | {"open": day.open}),
        "processor_seconds": totals_of(
            {
                "speeds": measured - began,
                "check": checked - measured,
                "day": played - checked,
            }
        ),
        "day": day.day.rows,
        "close_up": day.close_up.rows,
    }


def _assumed(hardware: Hardware) -> dict[str, Any]:
    return {
        "target": asdict(hardware.target),
        "draft": asdict(hardware.draft),
        "acceptance": ACCEPTANCE,
        "gpu_faults_per_hour": GPU_FAULTS_PER_HOUR,
        "repair_seconds": REPAIR_SECONDS,
        "scheduler_faults_per_hour": SCHEDULER_FAULTS_PER_HOUR,
        "scheduler_seconds": SCHEDULER_SECONDS,
        "bound": BALANCE,
    }


def _checked(compared: dict[str, Any], error: dict[str, float]) -> dict[str, Any]:
    events, fluid = totals_of(compared["events"]), totals_of(compared["fluid"])
    return {"rate": compared["rate"], "events": events, "fluid": fluid, "error": totals_of(error)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Plan()
    parser.add_argument(
        "--token-seconds", type=float, default=defaults.token_seconds, help="that autoscaling is to hold"
    )
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = parser.parse_args()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        result = simulated(Plan(token_seconds=arguments.token_seconds, seed=arguments.seed), progress)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
