"""Many schedules of faults, one for each seed: `python -m tests.sim.soak --seeds 1000`.

A seed that breaks a rule is printed with its last events, and `--first SEED --seeds 1` takes the same course again.
`--shrink SEED` looks for the shortest schedule that fails as this seed does, and prints all that happens in it.
`--json FILE` keeps a summary there, whole at every time, of all seeds up to the first that has not run: a run that was
ended goes on from its `next_seed`. `--draft-ahead 4` makes cells in which drafts prepare for outcomes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.record import origin
from tests.sim.cell.coverage import ALL_CHANGES, ALL_MEETINGS, PREPARED, never_seen
from tests.sim.cell.plan import FAULTS
from tests.sim.cell.schedule import ScheduleError, run_schedule
from tests.sim.cell.shrinking import shrink

_SEEDS_PER_PART = 20
_SUMMARY_EVERY_SECONDS = 10.0


@dataclass
class Tally:
    """What came of some schedules."""

    schedules: int = 0
    sequences: int = 0
    events: int = 0
    tokens: int = 0
    virtual_seconds: float = 0.0
    fenced_replies: int = 0
    structured: int = 0
    """Sequences with a grammar that finished."""
    structured_schedules: int = 0
    """Schedules that had some of these."""
    ahead_rows: int = 0
    """Rows with which drafts prepared for outcomes."""
    ahead_schedules: int = 0
    """Schedules that had some of these."""
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    meetings: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.schedules += other.schedules
        self.sequences += other.sequences
        self.events += other.events
        self.tokens += other.tokens
        self.virtual_seconds += other.virtual_seconds
        self.fenced_replies += other.fenced_replies
        self.structured += other.structured
        self.structured_schedules += other.structured_schedules
        self.ahead_rows += other.ahead_rows
        self.ahead_schedules += other.ahead_schedules
        self.outcomes += other.outcomes
        self.faults += other.faults
        self.changes += other.changes
        self.meetings += other.meetings
        self.failures += other.failures


def run_seeds(seeds: range, sequences: int, draft_ahead: int | None = None) -> Tally:
    """Goes on after a failure, whatever it is."""
    tally = Tally()
    gc.disable()
    for seed in seeds:
        tally.schedules += 1
        tally.sequences += sequences
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
        tally.events += len(result.events)
        tally.tokens += result.tokens
        tally.virtual_seconds += result.virtual_seconds
        tally.fenced_replies += result.fenced_replies
        tally.structured += result.structured
        tally.structured_schedules += bool(result.structured)
        tally.ahead_rows += result.ahead_rows
        tally.ahead_schedules += bool(result.ahead_rows)
        tally.outcomes += result.outcomes
        tally.faults += result.faults
        tally.changes += result.changes
        tally.meetings += result.meetings
    return tally


class Summary:
    """What came of the seeds so far, as JSON. Only seeds before which none is missing count."""

    def __init__(self, file: Path | None, first: int, jobs: int) -> None:
        self._file = file
        self._first = first
        self._jobs = jobs
        self._counted = Tally()
        self._later: dict[int, Tally] = {}
        self._began = self._written = time.monotonic()
        self._origin: dict[str, object] = {}
        if file is not None:
            command = " ".join(["python -m tests.sim.soak", *sys.argv[1:]])
            self._origin = origin(command)

    def add(self, seeds: range, tally: Tally) -> None:
        self._later[seeds.start] = tally
        while (found := self._later.pop(self._first + self._counted.schedules, None)) is not None:
            self._counted.add(found)
        if time.monotonic() - self._written > _SUMMARY_EVERY_SECONDS:
            self.write()

    def write(self) -> None:
        if self._file is None:
            return
        self._written = time.monotonic()
        tally = self._counted
        content = {
            **self._origin,
            "first_seed": self._first,
            "next_seed": self._first + tally.schedules,
            "schedules": tally.schedules,
            "sequences": tally.sequences,
            "seconds": round(self._written - self._began, 1),
            "jobs": self._jobs,
            "failures": tally.failures,
            "faults": dict(tally.faults.most_common()),
            "ends": dict(tally.outcomes.most_common()),
            "changes_of_state": {
                "in_table": len(ALL_CHANGES),
                "seen": dict(tally.changes.most_common()),
                "never_seen": never_seen(tally.changes),
            },
            "events_by_state": {
                "pairs": len(ALL_MEETINGS),
                "seen": dict(tally.meetings.most_common()),
                "never_seen": never_seen(tally.meetings, ALL_MEETINGS),
            },
            "events": tally.events,
            "tokens": tally.tokens,
            "fenced_replies": tally.fenced_replies,
            "structured": tally.structured,
            "structured_schedules": tally.structured_schedules,
            "ahead_schedules": tally.ahead_schedules,
            "ahead_rows": tally.ahead_rows,
            "prepared_rounds": tally.changes[PREPARED],
            "virtual_seconds": round(tally.virtual_seconds, 1),
        }
        shared = self._file.with_name(self._file.name + ".part")
        shared.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        shared.replace(self._file)


def _parts(first: int, count: int) -> Iterator[range]:
    for start in range(first, first + count, _SEEDS_PER_PART):
        yield range(start, min(start + _SEEDS_PER_PART, first + count))


def soak(
    console: Console,
    summary: Summary,
    first: int,
    count: int,
    sequences: int,
    jobs: int,
    most_failures: int,
    draft_ahead: int | None,
) -> Tally:
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
        running: dict[Future[Tally], range] = {}
        while True:
            while len(running) < 2 * jobs and len(total.failures) < most_failures:
                part = next(parts, None)
                if part is None:
                    break
                running[pool.submit(run_seeds, part, sequences, draft_ahead)] = part
            if not running:
                return total
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                tally = future.result()
                total.add(tally)
                summary.add(running.pop(future), tally)
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
    never = never_seen(total.changes)
    console.print(
        f"{len(ALL_CHANGES) - len(never)} of {len(ALL_CHANGES)} changes of state were seen"
        f"{'; never ' if never else ''}{', '.join(never)}",
        highlight=False,
    )
    console.print(
        f"{total.ahead_schedules:,} schedules had {total.ahead_rows:,} rows that prepared for outcomes, and "
        f"{total.changes[PREPARED]:,} rounds began with what was prepared",
        highlight=False,
    )
    console.print(
        highlight=False,
    )
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
    parser.add_argument("--most-failures", type=_at_least_one, default=100, help="stop after so many (default 100)")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="shorten the schedule of a seed that fails")
    parser.add_argument(
        "--draft-ahead", type=_at_least_one, metavar="N", help="every cell drafts, ahead too, for up to N outcomes"
    )
    parser.add_argument("--json", type=Path, help="file for a summary")
    given = parser.parse_args()
    console = Console()
    if given.shrink is not None:
        shrunk = shrink(given.shrink, given.sequences, draft_ahead=given.draft_ahead)
        report = f"seed {given.shrink} breaks no rule" if shrunk is None else shrunk.report()
        console.print(report, markup=False, highlight=False, soft_wrap=True)
        return 0 if shrunk is None else 1
    console.print(f"faults: {', '.join(FAULTS)}", highlight=False)
    summary = Summary(given.json, given.first, given.jobs)
    summary.write()  # so that a file that cannot be written ends the run at its start
    began = time.monotonic()
    try:
        total = soak(
            console,
            summary,
            given.first,
            given.seeds,
            given.sequences,
            given.jobs,
            given.most_failures,
            given.draft_ahead,
        )
    finally:
        summary.write()
    _report(console, total, time.monotonic() - began)
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
