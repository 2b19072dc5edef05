"""How much of a core one scheduler of a cell takes, and where that time goes. JSON on the last line.

    python -m bench.record fleet_scheduler -- python -m bench.fleet.scheduler_share

The load of `bench.core_speed` with many targets, several times; only seconds of the processor count, for others may
compute on the same machine. Then the core runs once more under a profiler, which says what share of its time each of
its modules takes: a hint only, since it makes short functions dearer than long ones.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

import scheduler
from bench.core_speed import Load, measure
from services.launch.process_tuning import keep_loaded_objects

ROWS_PER_SECOND = 100_000
"""Row decisions that a cell of 64 targets is meant to make in less than half a core."""
GOAL_SHARE = 0.5
_LOADS = (
    Load(rows=30_000),
    Load(targets=16, drafts=4, pool=2048, window=1024, batch_size=64, rows=30_000),
    Load(targets=64, drafts=16, pool=8192, window=512, batch_size=64, rows=30_000),
    Load(targets=64, drafts=16, pool=8192, window=1024, batch_size=64, rows=30_000),
    Load(targets=64, drafts=16, pool=8192, window=4096, batch_size=64, rows=30_000),
    Load(targets=64, drafts=16, pool=8192, window=4096, batch_size=64, draft_length=0, rows=30_000),
)
_PROFILED = replace(_LOADS[-2], rows=10_000)
_CORE = Path(scheduler.__file__).parent


def shares(load: Load, repeats: int) -> dict[str, Any]:
    """Microseconds of the processor for each row decision, and the share of a core at `ROWS_PER_SECOND`."""
    found = [measure(load) for _ in range(repeats)]
    micros = [1e6 / one.rows_per_processor_second for one in found]
    middle = statistics.median(micros)
    return {
        "load": asdict(load),
        "microseconds_a_row": {"median": middle, "least": min(micros), "most": max(micros)},
        "core_share": middle * 1e-6 * ROWS_PER_SECOND,
        "rows_an_event": found[0].rows / found[0].events,
        "microseconds_an_event": statistics.median(1e6 * one.processor_seconds_p50 for one in found),
    }


def profiled(load: Load) -> dict[str, float]:
    """Of the core's own time, the share of each of its modules, the largest first."""
    profile = cProfile.Profile()
    profile.runcall(measure, load)
    times: dict[str, float] = {}
    for (file, _line, _name), (_calls, _all, own, _cumulative, _callers) in _entries(profile):
        if (path := Path(file)).is_relative_to(_CORE):
            name = str(path.relative_to(_CORE))
            times[name] = times.get(name, 0.0) + own
    whole = sum(times.values())
    largest = sorted(times.items(), key=lambda item: item[1], reverse=True)
    return {name: seconds / whole for name, seconds in largest[:12]}


def _entries(profile: cProfile.Profile) -> Iterable[tuple[tuple[str, int, str], tuple[Any, Any, float, float, Any]]]:
    found: dict[Any, Any] = vars(pstats.Stats(profile))["stats"]
    return found.items()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    keep_loaded_objects()
    console = Console(stderr=True)
    loads = [shares(load, repeats) for load in track(_LOADS, "loads", console=console)]
    result = {"rows_per_second": ROWS_PER_SECOND, "goal_share": GOAL_SHARE, "repeats": repeats, "loads": loads}
    print(json.dumps(result | {"profile": profiled(_PROFILED)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
