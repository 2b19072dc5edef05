"""Many schedules of faults, one for each seed: `python -m tests.sim.soak --seeds 1000`.

A seed that breaks a rule is printed with its last events, and `--first SEED --seeds 1` takes the same course again.
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
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.sim.cell.plan import FAULTS
from tests.sim.cell.schedule import ScheduleError, run_schedule

_SEEDS_PER_PART = 20
_COLLECT_EVERY = 5


@dataclass
class Tally:
    """What came of some schedules."""

    schedules: int = 0
    tokens: int = 0
    virtual_seconds: float = 0.0
    fenced_replies: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.schedules += other.schedules
        self.tokens += other.tokens
        self.virtual_seconds += other.virtual_seconds
        self.fenced_replies += other.fenced_replies
        self.outcomes += other.outcomes
        self.faults += other.faults
        self.failures += other.failures


def run_seeds(seeds: range, sequences: int) -> Tally:
    """Goes on after a failure, whatever it is."""
    tally = Tally()
    gc.disable()
    for seed in seeds:
        tally.schedules += 1
        if seed % _COLLECT_EVERY == 0:
            gc.collect()
        try:
            result = run_schedule(seed, sequences)
        except ScheduleError as error:
            tally.failures.append(str(error))
            continue
        except Exception:
            tally.failures.append(f"seed {seed} with {sequences} sequences: {traceback.format_exc()}")
            continue
        tally.tokens += result.tokens
        tally.virtual_seconds += result.virtual_seconds
        tally.fenced_replies += result.fenced_replies
        tally.outcomes += result.outcomes
        tally.faults += result.faults
    return tally


def _parts(first: int, count: int) -> Iterator[range]:
    for start in range(first, first + count, _SEEDS_PER_PART):
        yield range(start, min(start + _SEEDS_PER_PART, first + count))


def soak(console: Console, first: int, count: int, sequences: int, jobs: int, most_failures: int) -> Tally:
    """Runs the seeds on `jobs` processes; begins no more once `most_failures` have failed."""
    total = Tally()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    began = time.monotonic()
    parts = _parts(first, count)
    with (
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=gc.freeze) as pool,
        Progress(*columns, console=console) as progress,
    ):
        bar = progress.add_task("schedules", total=count)
        running: set[Future[Tally]] = set()
        while True:
            while len(running) < 2 * jobs and len(total.failures) < most_failures:
                part = next(parts, None)
                if part is None:
                    break
                running.add(pool.submit(run_seeds, part, sequences))
            if not running:
                return total
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                tally = future.result()
                total.add(tally)
                for failure in tally.failures:
                    console.print(failure, markup=False, highlight=False, soft_wrap=True)
                rate = total.schedules / (time.monotonic() - began)
                failed = f", {len(total.failures)} failed" if total.failures else ""
                progress.update(bar, advance=tally.schedules, description=f"schedules, {rate:.1f}/s{failed}")


def _report(console: Console, total: Tally, seconds: float) -> None:
    table = Table("ends of sequences", "", "faults", "", title_justify="left")
    ends, faults = total.outcomes.most_common(), total.faults.most_common()
    for place in range(max(len(ends), len(faults))):
        end = ends[place] if place < len(ends) else ("", "")
        fault = faults[place] if place < len(faults) else ("", "")
        table.add_row(end[0], f"{end[1]:,}" if end[0] else "", fault[0], f"{fault[1]:,}" if fault[0] else "")
    console.print(table)
    console.print(
        f"{total.schedules:,} schedules in {seconds:.0f} s ({total.schedules / seconds:.1f}/s): "
        f"{total.virtual_seconds / 3600:.1f} h of virtual time, {total.tokens:,} tokens, "
        f"{total.fenced_replies:,} refusals of fenced schedulers, {len(total.failures)} failures",
        highlight=False,
    )


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
    parser.add_argument("--most-failures", type=_at_least_one, default=5, help="stop after so many (default 5)")
    given = parser.parse_args()
    console = Console()
    console.print(f"faults: {', '.join(FAULTS)}", highlight=False)
    began = time.monotonic()
    total = soak(console, given.first, given.seeds, given.sequences, given.jobs, given.most_failures)
    _report(console, total, time.monotonic() - began)
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
