"""The demo pair, a core each: first it is profiled, as `spool bench profile` does it, then it gets its loads.

The prediction knows the profile alone, rounded as `spool plan` would read it, and of the requests their arrivals and
lengths. Each load is at the rate at which it keeps the target busy for a certain share of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.plan_error.errors import errors, shown
from bench.profiling.measured_cell import MeasuredCell
from bench.profiling.measuring import measure_pair
from bench.profiling.pair import pair_launches
from bench.profiling.step_log import StepLog
from bench.profiling.text_prompts import TextPrompts
from deploy.config.spool_config import SpoolConfig
from deploy.models import prepare_models
from deploy.offline.cell import launched_cell
from deploy.offline.prompts import load_prompts
from deploy.planning.fleets import Fleet, System, simulate
from deploy.planning.open_loop import LoadFigures, summarised
from deploy.planning.plan_file import PlanFile
from deploy.planning.traffic import Lengths, PlannedRequest, drawn
from deploy.progress import Reporter
from scheduler.config import SchedulerConfig
from scheduler.messages import Role
from services.backend.interface import GenerationRequest

BUSY_SHARES = (0.1, 0.25, 0.4, 0.55, 0.7)
"""Of the target's time, by the prediction."""
_LONG_PROMPT = 256
_LONGEST_PROMPT = 96
_OUTPUT = Lengths(16, 0.6, 64)
"""Tokens. Short, so that a load of a tenth of the target's time has many requests."""
_HALVINGS = 8


async def compared_demo(prompts: Path | None, least: int, seconds: float, reporter: Reporter) -> dict[str, Any]:
    """Each load has as many requests as arrive in so many seconds, and `least` where these are more."""
    config = SpoolConfig()
    models = prepare_models(config.models, True, reporter)
    texts = TextPrompts([text.encode(models.tokenizer) for text in load_prompts(prompts, None)])
    async with launched_cell(pair_launches(config), reporter) as launched:
        cell = MeasuredCell(launched)

        def say(what: str, share: float) -> None:
            reporter.stage("profile", what, share)

        profile = await measure_pair(cell, config.scheduler_config(), texts, _LONG_PROMPT, say)
        known = profile.plan(config.scheduler_config())
        plan = PlanFile.model_validate({"traffic": {"requests_per_second": 1}, **known})
        loads = []
        for number, share in enumerate(BUSY_SHARES):
            load = _Load(plan, texts, number)
            rate = load.rate_for(share, least)
            asked = load.requests(rate, max(least, round(rate * seconds)))
            predicted, measured = load.predicted(asked), await load.measured(cell, asked)
            error = errors(measured, predicted)
            reporter.stage(f"target {share:.0%} busy", shown(error), 1)
            loads.append({"rate": rate, "measured": asdict(measured), "predicted": asdict(predicted), "error": error})
    return {
        "workers": "demo",
        "plan": known,
        "profile": asdict(profile),
        "longest_prompt": _LONGEST_PROMPT,
        "output_tokens": _OUTPUT.mean,
        "loads": loads,
    }


class _Load:
    """Requests of the texts' lengths."""

    def __init__(self, plan: PlanFile, texts: TextPrompts, seed: int) -> None:
        self._plan = plan
        self._texts = texts
        self._seed = seed

    @property
    def _config(self) -> SchedulerConfig:
        return self._plan.scheduling.config(drafting=True)

    def requests(self, rate: float, count: int) -> list[PlannedRequest]:
        """So many a second, at random."""
        lengths = [len(prompt) for prompt in self._texts.whole(count, _LONGEST_PROMPT)]
        asked = drawn(rate, count, Lengths(1, 0, 1), _OUTPUT, seed=self._seed)
        return [replace(one, prompt_tokens=length) for one, length in zip(asked, lengths, strict=True)]

    def predicted(self, asked: Sequence[PlannedRequest]) -> LoadFigures:
        (target,), (draft,) = self._plan.kinds(self._plan.target), self._plan.kinds(self._plan.draft)
        return simulate(self._plan, asked, Fleet(System.APART, target, draft, 1, 1))

    def rate_for(self, share: float, count: int) -> float:
        """Requests a second that keep the target busy for this share of the time."""
        low, high = 1e-3, 1e3
        for _ in range(2 * _HALVINGS):
            rate = (low * high) ** 0.5
            if self.predicted(self.requests(rate, count)).target_busy < share:
                low = rate
            else:
                high = rate
        return low

    async def measured(self, cell: MeasuredCell, asked: Sequence[PlannedRequest]) -> LoadFigures:
        prompts = self._texts.whole(len(asked), _LONGEST_PROMPT)
        requests = [GenerationRequest(prompt, one.output_tokens) for prompt, one in zip(prompts, asked, strict=True)]
        log = StepLog()
        times = await cell.run(self._config, requests, [one.arrival for one in asked], log)
        span = max(one.last for one in times) - asked[0].arrival
        busy = {role: sum(step.seconds for step in steps) / span for role, steps in log.steps.items()}
        return replace(summarised(times), target_busy=busy[Role.TARGET], draft_busy=busy[Role.DRAFT])
