"""Many schedules of faults, one for each seed: `python -m tests.sim.soak --seeds 1000`.

A seed that breaks a rule is printed with its last events, and `--first SEED --seeds 1` takes the same course again.
`--served` makes cells in which draft workers serve all targets, `--kinds` schedules of some faults only.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

from tests.sim.cell.plan import FAULTS
from tests.sim.cell.schedule import ScheduleError, ScheduleResult, run_schedule

_SEEDS_PER_PART = 20
_SEEDS_PER_REPORT = 200


def run_seed(seed: int, sequences: int, served: bool, kinds: tuple[str, ...]) -> ScheduleResult | str:
    """What came of it, without the events; of a schedule that failed, in whatever way, how."""
    # What a schedule leaves behind is dropped while it is still in the processor's caches.
    gc.collect()
    try:
        return replace(run_schedule(seed, sequences, kinds, served), events=())
    except ScheduleError as error:
        return str(error)
    except Exception:  # noqa: BLE001
        return f"seed {seed} with {sequences} sequences: {traceback.format_exc()}"


def _begin_process() -> None:
    gc.freeze()
    gc.disable()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="number of schedules (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--sequences", type=int, default=200, help="sequences of a schedule (default 200)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--served", action="store_true", help="draft workers serve the targets of every cell")
    parser.add_argument("--kinds", nargs="+", default=FAULTS, help="kinds of faults (default: all)")
    given = parser.parse_args()
    began, tokens, failures = time.monotonic(), 0, 0
    ends, faults = Counter[str](), Counter[str]()
    run = partial(run_seed, sequences=given.sequences, served=given.served, kinds=tuple(given.kinds))
    seeds = range(given.first, given.first + given.seeds)
    with ProcessPoolExecutor(given.jobs, get_context("spawn"), _begin_process) as pool:
        for count, result in enumerate(pool.map(run, seeds, chunksize=_SEEDS_PER_PART), 1):
            if isinstance(result, str):
                print(result, flush=True)
                failures += 1
            else:
                tokens += result.tokens
                ends += result.outcomes
                faults += result.faults
            if count % _SEEDS_PER_REPORT == 0 or count == given.seeds:
                seconds = time.monotonic() - began
                print(
                    f"{count:,} schedules in {seconds:.0f} s ({count / seconds:.1f}/s), {tokens:,} tokens, "
                    f"{failures} failures",
                    flush=True,
                )
    for what, counts in (("ends", ends), ("faults", faults)):
        print(f"{what}: {', '.join(f'{name} {count:,}' for name, count in counts.most_common())}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
