"""Many schedules of faults, one for each seed: `python -m tests.sim.soak --seeds 1000`.

A seed that breaks a rule is printed with its last events, and `--first SEED --seeds 1` takes the same course again.
`--shrink SEED` looks for the shortest schedule that fails as this seed does, and prints all that happens in it.
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
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.sim.cell.schedule import ScheduleError, run_schedule
from tests.sim.cell.shrinking import shrink

_SEEDS_PER_PART = 20
_REPORT_EVERY_SECONDS = 10.0


@dataclass
class Tally:
    """What came of some schedules."""

    schedules: int = 0
    tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.schedules += other.schedules
        self.tokens += other.tokens
        self.outcomes += other.outcomes
        self.faults += other.faults
        self.changes += other.changes
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
        tally.changes += result.changes
    return tally


def _parts(first: int, count: int) -> Iterator[range]:
    for start in range(first, first + count, _SEEDS_PER_PART):
        yield range(start, min(start + _SEEDS_PER_PART, first + count))


def soak(first: int, count: int, sequences: int, jobs: int, most_failures: int, draft_ahead: int | None) -> Tally:
    """Runs the seeds on `jobs` processes; begins no more once `most_failures` have failed."""
    total = Tally()
    parts = _parts(first, count)
    began = reported = time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=gc.freeze) as pool:
        running = set()
        while True:
            while len(running) < 2 * jobs and len(total.failures) < most_failures:
                part = next(parts, None)
                if part is None:
                    break
                running.add(pool.submit(run_seeds, part, sequences, draft_ahead))
            if not running:
                return total
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                tally = future.result()
                total.add(tally)
                for failure in tally.failures:
                    print(failure, flush=True)
            now = time.monotonic()
            if now - reported > _REPORT_EVERY_SECONDS:
                reported = now
                rate = total.schedules / (now - began)
                print(f"{total.schedules:,} of {count:,} schedules, {rate:.1f}/s", flush=True)


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {value}, must be at least 1")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=_at_least_one, default=1000, help="number of schedules (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--sequences", type=_at_least_one, default=200, help="sequences of a schedule (default 200)")
    parser.add_argument(
        "--jobs", type=_at_least_one, default=os.cpu_count() or 1, help="processes (default: one a core)"
    )
    parser.add_argument("--most-failures", type=_at_least_one, default=100, help="stop after so many (default 100)")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="shorten the schedule of a seed that fails")
    parser.add_argument(
        "--draft-ahead", type=_at_least_one, metavar="N", help="every cell drafts, ahead too, for up to N outcomes"
    )
    given = parser.parse_args()
    if given.shrink is not None:
        report = shrink(given.shrink, given.sequences, draft_ahead=given.draft_ahead)
        print(report or f"seed {given.shrink} breaks no rule")
        return 1 if report else 0
    began = time.monotonic()
    total = soak(given.first, given.seeds, given.sequences, given.jobs, given.most_failures, given.draft_ahead)
    seconds = time.monotonic() - began
    for what, counts in (("ends", total.outcomes), ("faults", total.faults), ("changes of state", total.changes)):
        print(f"{what}: {', '.join(f'{name} {count:,}' for name, count in counts.most_common())}")
    print(
        f"{total.schedules:,} schedules in {seconds:.0f} s ({total.schedules / seconds:.1f}/s), "
        f"{total.tokens:,} tokens, {len(total.failures)} failures"
    )
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
