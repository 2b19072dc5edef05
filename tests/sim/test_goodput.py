"""How fast cells decode, in virtual time: AUTO against every fixed draft length, on workers whose costs are known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest

from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.key_class import KeyClass
from spool.scheduler.messages import Role
from spool.services.backend.interface import GenerationRequest
from tests.sim.cell.plan import DRAFT_CHANGES, OWN, Fault, Plan, RequestPlan, WorkerPlan
from tests.sim.cell.schedule import ScheduleResult, run_plan


@dataclass(frozen=True)
class Costs:
    """Seconds of steps. A target reads its weights, computes tokens and reads KV; a draft does so in each pass."""

    base: float
    row: float
    draft_base: float
    draft_row: float
    kv: float = 0.0
    draft_kv: float = 0.0


COSTS = {
    "gpu": Costs(0.005, 0.00002, 0.0008, 0.000005),
    "cpu": Costs(0.015, 0.0007, 0.003, 0.0002),
    "rows cost": Costs(0.004, 0.0025, 0.0008, 0.0001),
    "KV costs": Costs(0.005, 0.00002, 0.0008, 0.000005, 2e-6, 1.5e-6),
}
# Four passes take most of the 1.5 steps that a step with a fixed draft length may wait.
SLOW_DRAFT = {"slow draft": Costs(0.005, 0.00002, 0.0016, 0.000005)}
LONGEST = 4
ANSWER = 160


def requests(count: int, prompt: int, answer: int, draft_length: int | None = None) -> list[GenerationRequest]:
    rng = random.Random(count)
    prompts = (tuple(rng.randrange(60) for _ in range(prompt)) for _ in range(count))
    return [GenerationRequest(each, answer, draft_length=draft_length) for each in prompts]


def run(
    name: str,
    acceptance: float,
    config: SchedulerConfig,
    wanted: Sequence[GenerationRequest],
    changes: tuple[Fault, ...] = (),
    own: bool = False,
    targets: int = 1,
) -> ScheduleResult:
    """Targets that one draft worker serves or that have an `own` draft of the same costs, and all requests at once."""
    costs = (COSTS | SLOW_DRAFT)[name]
    target = WorkerPlan("target", Role.TARGET, 4096, 8, 4096, acceptance, costs.base, costs.row, 0, costs.kv)
    draft = WorkerPlan(
        "draft", Role.DRAFT, 4096, 8, 4096, acceptance, costs.draft_base, costs.draft_row, 0, costs.draft_kv
    )
    if own:
        target = replace(
            target,
            own_draft=OWN,
            own_seconds=costs.draft_base,
            own_row_seconds=costs.draft_row,
            own_kv_seconds=costs.draft_kv,
        )
    workers = (*(replace(target, worker_id=f"target{place}") for place in range(targets)), *(() if own else (draft,)))
    arrivals = tuple(RequestPlan(number, 0, 0.01, request, None, False) for number, request in enumerate(wanted))
    plan = Plan(1, config, workers, 1, arrivals, changes, 0.0005, 0.0, False, longest=4096)
    return run_plan(plan, random.Random(1))


def seconds(result: ScheduleResult) -> float:
    ends = [event for event in result.events if event[1] == "end"]
    assert {event[3] for event in ends} == {"length"}
    return max(event[0] for event in ends)


@cache
def rate(
    name: str,
    acceptance: float,
    batch_size: int,
    draft_length: int | None = None,
    own: bool = False,
    hangs: bool = False,
) -> float:
    """Tokens per second. Without a `draft_length` AUTO chooses. A draft worker that `hangs` does so from early on."""
    config = SchedulerConfig(
        batch_size=batch_size,
        max_running=64,
        policy=Policy.AUTO,
        draft_length=LONGEST if draft_length is None else draft_length,
    )
    prompt = 400 if name == "KV costs" else 20
    changes = (Fault(0.2, "draft hangs", 1000.0, 0.0, 0.0),) if hangs else ()
    result = run(name, acceptance, config, requests(batch_size, prompt, ANSWER, draft_length), changes, own)
    return batch_size * ANSWER / seconds(result)


@pytest.mark.sampled(17, 3)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", COSTS)
def test_auto_is_about_as_fast_as_the_best_fixed_draft_length(
    name: str, acceptance: float, batch_size: int, own: bool
) -> None:
    """From the first token on: what AUTO tries out while it learns is part of the time."""
    auto = rate(name, acceptance, batch_size, own=own)
    assert auto >= 0.92 * rate(name, acceptance, batch_size, 0, own)
    assert auto >= 0.86 * max(rate(name, acceptance, batch_size, length, own) for length in range(1, LONGEST + 1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("name", "gain"), [("gpu", 2.0), ("cpu", 1.5), ("KV costs", 1.75)])
def test_a_single_stream_gains_where_the_draft_is_good(name: str, gain: float, own: bool) -> None:
    assert rate(name, 0.9, 1, own=own) > gain * rate(name, 0.9, 1, 0, own)


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("name", ["gpu", "cpu"])
def test_a_draft_worker_is_nearly_as_good_as_a_draft_of_the_targets_own(name: str, batch_size: int) -> None:
    assert rate(name, 0.7, batch_size) > 0.85 * rate(name, 0.7, batch_size, own=True)


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("draft_length", [None, LONGEST])
def test_a_draft_worker_that_hangs_costs_next_to_nothing(draft_length: int | None, batch_size: int) -> None:
    """Compared with plain decoding, whether AUTO chooses or the request."""
    hung = rate("gpu", 0.9, batch_size, draft_length, hangs=True)
    assert hung > 0.9 * rate("gpu", 0.9, batch_size, 0)


def test_a_draft_worker_that_needs_most_of_the_longest_wait_does_not_stay_late() -> None:
    """Now and then it is late three times in a row. It must not be one proposal behind from then on."""
    assert rate("slow draft", 0.9, 8, LONGEST) > 1.3 * rate("slow draft", 0.9, 8, 0)


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("before", "after", "gain"), [(0.9, 0.0, 0.95), (0.0, 0.9, 1.2)])
def test_a_draft_that_changes_is_noticed(before: float, after: float, gain: float, own: bool) -> None:
    config = SchedulerConfig(batch_size=4, policy=Policy.AUTO, draft_length=LONGEST)
    change = Fault(1.0, DRAFT_CHANGES, 0.0, 0.9, after)
    took = seconds(run("cpu", before, config, requests(4, 20, 2 * ANSWER), (change,), own))
    assert 4 * 2 * ANSWER / took > gain * rate("cpu", 0.0, 4, 0)


def test_one_draft_worker_serves_two_targets() -> None:
    """Both gain as much as if each had one of its own, for it is quick."""
    config = SchedulerConfig(batch_size=4, policy=Policy.AUTO, draft_length=LONGEST)
    wanted = requests(8, 20, ANSWER)
    served = seconds(run("gpu", 0.9, config, wanted, targets=2))
    assert served < 1.25 * seconds(run("gpu", 0.9, config, wanted, own=True, targets=2))


def test_keys_share_a_cell_by_their_weights() -> None:
    """As long as both have requests that wait."""
    config = SchedulerConfig(
        batch_size=4, max_running=4, draft_length=2, keys=(KeyClass("heavy", 3.0), KeyClass("light", 1.0))
    )
    wanted = [
        GenerationRequest(request.prompt, request.max_tokens, key=("heavy", "light")[number % 2])
        for number, request in enumerate(requests(160, 10, 10))
    ]
    ends = [event[2] for event in run("gpu", 0.7, config, wanted).events if event[1] == "end"]
    heavy = sum(wanted[number].key == "heavy" for number in ends[:80])
    assert 56 <= heavy <= 64
