"""Many schedules of faults, one for each seed: `python -m tests.sim.soak --seeds 1000`.

A seed that breaks a rule is printed with its last events, and `--first SEED --seeds 1` takes the same course again.
`--draft-ahead 4` makes cells in which drafts prepare for outcomes.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.sim.cell.schedule import ScheduleError, run_schedule

_SEEDS_PER_PART = 20
_PARTS_PER_REPORT = 10


@dataclass
class Tally:
    """What came of some schedules."""

    schedules: int = 0
    tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.schedules += other.schedules
        self.tokens += other.tokens
        self.outcomes += other.outcomes
        self.faults += other.faults
        self.failures += other.failures


def run_seeds(seeds: range, sequences: int, draft_ahead: int | None = None) -> Tally:
    """Goes on after a failure, whatever it is."""
    tally = Tally(len(seeds))
    gc.disable()
    for seed in seeds:
        # What a schedule leaves behind is dropped while it is still in the processor's caches.
        gc.collect()
        try:
            result = run_schedule(seed, sequences, draft_ahead=draft_ahead)
        except ScheduleError as error:
            tally.failures.append(str(error))
            continue
        except Exception:
            tally.failures.append(f"seed {seed} with {sequences} sequences: {traceback.format_exc()}")
            continue
        tally.tokens += result.tokens
        tally.outcomes += result.outcomes
        tally.faults += result.faults
    return tally


def soak(parts: list[range], sequences: int, jobs: int, draft_ahead: int | None) -> Tally:
    """Runs the seeds on `jobs` processes."""
    total, began = Tally(), time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=gc.freeze) as pool:
        futures = [pool.submit(run_seeds, part, sequences, draft_ahead) for part in parts]
        for count, future in enumerate(as_completed(futures), 1):
            tally = future.result()
            total.add(tally)
            for failure in tally.failures:
                print(failure, flush=True)
            if count % _PARTS_PER_REPORT == 0:
                rate = total.schedules / (time.monotonic() - began)
                print(f"{total.schedules:,} schedules, {rate:.1f}/s, {len(total.failures)} failed", flush=True)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="number of schedules (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--sequences", type=int, default=200, help="sequences of a schedule (default 200)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--draft-ahead", type=int, metavar="N", help="every cell drafts, ahead too, for N outcomes")
    given = parser.parse_args()
    began = time.monotonic()
    seeds = range(given.first, given.first + given.seeds)
    parts = [seeds[start : start + _SEEDS_PER_PART] for start in range(0, len(seeds), _SEEDS_PER_PART)]
    total = soak(parts, given.sequences, given.jobs, given.draft_ahead)
    seconds = time.monotonic() - began
    for what, counts in (("ends", total.outcomes), ("faults", total.faults)):
        print(f"{what}: {', '.join(f'{name} {count:,}' for name, count in counts.most_common())}")
    print(
        f"{total.schedules:,} schedules in {seconds:.0f} s ({total.schedules / seconds:.1f}/s), "
        f"{total.tokens:,} tokens, {len(total.failures)} failures"
    )
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
