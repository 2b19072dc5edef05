"""Tests the tests: how many small changes of the product's logic they notice. `python -m tests.mutants`.

Each mutant is run in a fork by the unit tests that reach its line, then by tests over gRPC, by the core simulation and
by cells under faults, until one fails. What is known stays in `--folder`, and the next run goes on from there.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.record import write_result
from tests.mutants.campaign import Campaign, run_pytest
from tests.mutants.equivalents import FILE, read_equivalents
from tests.mutants.outcomes import summary
from tests.mutants.sources import LOGIC, ROOT, modules_of

CHECKS = (
    "tests/unit/scheduler",
    "tests/unit/services",
    "tests/unit/gateway",
    "tests/integration/scheduler",
    "tests/integration/workers/test_protocol_versions.py",
    "tests/integration/workers/test_registration.py",
    "tests/integration/workers/test_service.py",
    "tests/sim/test_core_simulation.py",
    "tests/sim/test_wire.py",
    "tests/mutants/simulations.py",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", default=LOGIC, metavar="PATH", help="files and folders to mutate")
    parser.add_argument("--checks", nargs="+", default=CHECKS, metavar="PATH", help="tests that are to kill them")
    parser.add_argument("--seed", type=int, default=0, help="of the order (default 0)")
    parser.add_argument("--sample", type=int, help="run so many of them, drawn at random (default: all)")
    parser.add_argument("--minutes", type=float, help="begin no more after so long; the sample is then smaller")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants", help="where outcomes are kept")
    parser.add_argument("--equivalent", type=Path, default=FILE, help="list of mutants that change nothing")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    console = Console(stderr=True)
    # Neither may start threads before there are forks.
    os.environ["OMP_NUM_THREADS"] = "1"
    modules = modules_of(tuple(given.modules))
    equivalents = read_equivalents(given.equivalent)
    campaign = Campaign(console, modules, equivalents, given.folder, given.seed, given.sample, given.minutes)
    os.chdir(ROOT)
    code = run_pytest(given.checks, [campaign])
    if code:
        console.print(f"pytest ended with {code}")
        return code
    figures = summary(modules, campaign.judged, equivalents, given.seed)
    _report(Console(), figures)
    for problem in campaign.problems:
        console.print(problem, highlight=False, soft_wrap=True)
    if given.json is not None:
        write_result(given.json, " ".join(["python -m tests.mutants", *sys.argv[1:]]), figures)
    return 1 if campaign.problems else 0


def _report(console: Console, figures: dict) -> None:
    for name in figures["survivors"]:
        console.print(f"survived  {name}", markup=False, highlight=False, soft_wrap=True)
    table = Table("module", "made", "run", *figures["killed_by"], "survived", "equivalent", title_justify="left")
    for path, found in figures["by_module"].items():
        numbers = (found["made"], found["run"], *found["killed_by"].values(), found["survived"], found["equivalent"])
        table.add_row(path, *map(str, numbers))
    console.print(table)
    sure = f", with 95 % confidence {figures['confidence_95']}" if "confidence_95" in figures else ""
    console.print(
        f"{figures['killed']:,} of {figures['killed'] + figures['survived']:,} mutants killed: "
        f"{figures['share_killed']:.2%}{sure}; {figures['made']:,} made, {figures['equivalent']} equivalent",
        highlight=False,
    )


if __name__ == "__main__":
    sys.exit(main())
