"""Runs mutants, one fork each: a plugin that takes the place of pytest's loop over tests, once these are collected.

So all is imported and collected once, and a fork has but to change its code and run tests until the first one fails.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.mutants.checks import Check, Measurements, checks_for
from tests.mutants.equivalents import unknown
from tests.mutants.forks import ForkReport, Say, in_fork, limit_processor_time
from tests.mutants.operators import Mutant
from tests.mutants.outcomes import SURVIVED, Judged, Outcome, Outcomes, digest_of
from tests.mutants.planting import Functions, forget_imports
from tests.mutants.sources import Module, digest

_SECONDS_TO_IMPORT = 60.0


class OneByOne:
    """Runs single tests, without looking for the smallest example that fails."""

    def __init__(self) -> None:
        self.failed = False

    @pytest.hookimpl
    def pytest_sessionstart(self) -> None:
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutants", hypothesis.settings(), phases=phases)
        hypothesis.settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.failed = self.failed or report.failed

    def passes(self, item: pytest.Item, following: pytest.Item | None = None) -> bool:
        self.failed = False
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return not self.failed


class Announcing(OneByOne):
    """Says the name of each test before it runs, and gives it time in proportion to what it needs."""

    def __init__(self, say: Say, seconds: Mapping[str, float]) -> None:
        super().__init__()
        self._say = say
        self._seconds = seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        self._say(item.nodeid)
        limit_processor_time(2.0 + 10.0 * self._seconds[item.nodeid])


class Campaign(OneByOne):
    """`judged` is what came of it; `problems` what is wrong with the list of equivalents."""

    def __init__(
        self,
        console: Console,
        modules: Sequence[Module],
        equivalents: Mapping[str, str],
        folder: Path,
        seed: int,
        sample: int | None,
        minutes: float | None,
    ) -> None:
        super().__init__()
        self._console = console
        self._modules = modules
        self._equivalents = equivalents
        self._folder = folder
        self._seed = seed
        self._sample = sample
        self._ends = float("inf") if minutes is None else time.monotonic() + 60 * minutes
        self.judged: Judged = []
        self.problems: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if self.failed:
            raise session.Failed("tests could not be collected")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        gc.collect()
        gc.freeze()
        with Progress(*columns, console=self._console) as progress:
            checks = list(self._checks(session.items, progress))
            self.judged = list(self._judge_all(checks, progress))
        made = {module.name_of(mutant) for module in self._modules for mutant in module.mutants}
        names = {module.name for module in self._modules}
        self.problems = [f"no such mutant: {name}" for name in unknown(self._equivalents, made, names)]
        self.problems += [
            f"listed as equivalent, killed by {outcome.killer}: {outcome.mutant}"
            for _, _, outcome in self.judged
            if outcome.killed and outcome.mutant in self._equivalents
        ]
        return True

    def _checks(self, items: Sequence[pytest.Item], progress: Progress) -> Iterator[Check]:
        measurements = Measurements(self._folder / "checks.json", self._modules, self.passes)
        bar = progress.add_task("tests measured", total=len(items))
        for item in items:
            check = measurements.check(item)
            if check is None:
                self._console.print(f"no check, as it fails or takes long: {item.nodeid}", highlight=False)
            else:
                yield check
            progress.advance(bar)
            if item is items[-1] or progress.tasks[bar].completed % 50 == 0:
                measurements.save()

    def _judge_all(self, checks: Sequence[Check], progress: Progress) -> Iterator[tuple[Module, Mutant, Outcome]]:
        """In an order by the seed, so that those of a run that ends early are a random sample."""
        all_mutants = [(module, mutant) for module in self._modules for mutant in module.mutants]
        all_mutants.sort(key=lambda found: digest(f"{self._seed} {found[0].name_of(found[1])}"))
        chosen = all_mutants[: self._sample]
        functions = Functions(self._modules)
        outcomes = Outcomes(self._folder / "outcomes.jsonl")
        bar = progress.add_task("mutants", total=len(chosen))
        lived = 0
        for module, mutant in chosen:
            able = checks_for(mutant, module, checks)
            outcome = outcomes.valid(module.name_of(mutant), module, able)
            if outcome is None:
                if time.monotonic() > self._ends:
                    return
                outcome = self._judge(module, mutant, able, functions)
                outcomes.add(outcome)
            lived += not outcome.killed and outcome.mutant not in self._equivalents
            progress.update(bar, advance=1, description=f"mutants, {lived} survived")
            yield module, mutant, outcome

    def _judge(self, module: Module, mutant: Mutant, checks: Sequence[Check], functions: Functions) -> Outcome:
        seconds = {check.name: check.seconds for check in checks}

        def work(say: Say) -> None:
            if functions.plant(module, mutant):
                self._run(checks, say, seconds)
            else:
                self._import_and_run(module, checks, say, seconds)

        began = time.monotonic()
        report = in_fork(work) if checks else ForkReport([], "done")
        end = report.end
        if end == "done":
            end = "failed" if report.said[-1:] == ["failed"] else SURVIVED
        ran = [line for line in report.said if line in seconds]
        killer = "" if end == SURVIVED else ran[-1] if ran else checks[0].name
        relevant = checks if end == SURVIVED else [check for check in checks if check.name == killer]
        name, took = module.name_of(mutant), round(time.monotonic() - began, 2)
        return Outcome(name, mutant.lines.start, end, killer, took, module.digest, digest_of(relevant))

    def _run(self, checks: Sequence[Check], say: Say, seconds: Mapping[str, float]) -> None:
        announcing = Announcing(say, seconds)
        items = [check.item for check in checks]
        for item, following in zip(items, [*items[1:], None], strict=True):
            announcing.pytest_runtest_protocol(item)
            if not self.passes(item, following):
                say("failed")
                return

    def _import_and_run(self, module: Module, checks: Sequence[Check], say: Say, seconds: Mapping[str, float]) -> None:
        limit_processor_time(_SECONDS_TO_IMPORT)
        # Here, since the run may end before it has removed its folder.
        tempfile.tempdir = os.environ["SPOOL_TEST_RUN"]
        forget_imports(module)
        plugin = Announcing(say, seconds)
        code = run_pytest([check.name for check in checks], [plugin], "-x")
        if plugin.failed or code != pytest.ExitCode.OK:
            say("failed")


def run_pytest(tests: Sequence[str], plugins: list[Any], *options: str) -> int:
    """Quietly, in this process."""
    own = ("-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:xdist", "--capture=no", "--timeout=0")
    return int(pytest.main([*own, "-m", "not ray and not long", *options, *tests], plugins))
