"""What a profile learns from steps: against laws that are known."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.profiling.loads import answers_load, cost_loads
from bench.profiling.pair import pair_launches
from bench.profiling.profile import Profile, WorkerProfile
from bench.profiling.step_law import StepLaw, law_of
from bench.profiling.step_log import StepLog, TimedStep
from bench.profiling.text_prompts import TextPrompts
from deploy.config.loading import configuration_from
from deploy.planning.open_loop import OpenLoop, join_all
from deploy.planning.plan_file import PlanFile
from deploy.planning.traffic import Lengths, drawn
from deploy.planning.virtual_cell import Costs
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import Command, Event, Role, Row, RowResult, RowStatus, SendStep, StepCompleted
from services.observability.observer import StepTimings

# --- the law ----------------------------------------------------------------------------------------------------------


def steps_of(step: float, token: float, kv_token: float, block: int, jitter: float) -> list[TimedStep]:
    """Of a target and of a draft, long and short; by a law that is written down here once more."""
    rng, found = random.Random(7), []
    for _ in range(400):
        passes = tuple(rng.randint(1, 100) for _ in range(rng.choice([1, 1, 2, 4])))
        kv_tokens = rng.choice([0, 50, 400, 4000])
        blocks = sum((tokens + block - 1) // block for tokens in passes)
        seconds = (step + kv_token * kv_tokens) * len(passes) + token * block * blocks
        found.append(TimedStep(seconds * rng.uniform(1 - jitter, 1 + jitter), passes, kv_tokens, 1, True, None, None))
    return found


@pytest.mark.parametrize("block", [1, 6, 16])
def test_finds_the_law_of_its_steps(block: int) -> None:
    law = law_of(steps_of(0.01, 0.0005, 0.000002, block, jitter=0.02))
    assert law.block_tokens == block
    assert law.step == pytest.approx(0.01, rel=0.03)
    assert law.token == pytest.approx(0.0005, rel=0.03)
    assert law.kv_token == pytest.approx(0.000002, rel=0.05)
    assert law.error == pytest.approx(0.01, rel=0.25), "half of the errors of an even distribution are below its middle"
    assert law.steps == 400


def test_no_cost_is_negative() -> None:
    steps = [TimedStep(0.01 - 1e-7 * kv, (1,), kv, 1, True, None, None) for kv in range(0, 4000, 100)]
    law = law_of(steps)
    assert min(law.step, law.token, law.kv_token) >= 0
    assert law.step + law.token == pytest.approx(0.0098, rel=0.02)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="11 steps were measured, must be at least 12"):
        law_of(steps_of(0.01, 0.0, 0.0, 1, 0.0)[:11])


# --- the steps --------------------------------------------------------------------------------------------------------


def row(sequence_id: int, kv_len: int, fed: int, drafts: int = 0, length: int = 0, sample: bool = False) -> Row:
    return Row(sequence_id, kv_len, 0, (5,) * fed, (6,) * drafts, length, sample)


def answered(log: StepLog, role: Role, rows: Sequence[Row], accepted: Sequence[int], sent: float, came: float) -> None:
    step = SendStep(role.value, int(sent * 1000), tuple(rows))
    results = [
        RowResult(one.sequence_id, RowStatus.OK, 0, 0, (), taken) for one, taken in zip(rows, accepted, strict=True)
    ]
    log.step_sent(role, step, sent)
    log.step_replied(role, step, tuple(results), StepTimings(total=0.02), came)


def test_counts_what_steps_compute() -> None:
    log = StepLog()
    rows = [row(1, 100, 1, drafts=3, sample=True), row(2, 50, 2, drafts=4, sample=True), row(3, 0, 60)]
    answered(log, Role.TARGET, rows, [3, 1, 0], 1.0, 1.025)
    answered(log, Role.TARGET, [row(1, 104, 1, sample=True)], [0], 1.03, 1.06)
    answered(log, Role.DRAFT, [row(1, 100, 2, length=3), row(2, 50, 1, length=1)], [0, 0], 1.0, 1.03)
    mixed, plain = log.steps[Role.TARGET]
    assert (mixed.pass_tokens, mixed.kv_tokens, mixed.rows, mixed.decoding) == ((1 + 3 + 2 + 4 + 60,), 150, 3, False)
    assert (plain.pass_tokens, plain.decoding) == ((1,), True)
    assert (mixed.wire, mixed.pause) == (pytest.approx(0.005), None)
    assert (plain.wire, plain.pause) == (pytest.approx(0.01), pytest.approx(0.005))
    (draft,) = log.steps[Role.DRAFT]
    assert (draft.pass_tokens, draft.kv_tokens) == ((3, 1, 1), 150)
    assert (log.accepted, log.tried) == (4, 5), "three of three, and one before one that was not"


class Logged(OpenLoop):
    """Writes its steps into a log, as a service would."""

    log: StepLog
    sent: dict[tuple[str, int], SendStep]

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, SendStep):
                self.log.step_sent(self.workers[command.worker_id].spec.role, command, self.now)
                self.sent[command.worker_id, command.step_id] = command
        super()._carry_out(commands)

    def tell(self, event: Event) -> None:
        if isinstance(event, StepCompleted):
            step, role = self.sent.pop((event.worker_id, event.step_id)), self.workers[event.worker_id].spec.role
            self.log.step_replied(role, step, event.results, StepTimings(total=event.seconds), self.now)
        super().tell(event)


@pytest.mark.parametrize("policy", [Policy.RAGGED, Policy.AUTO])
def test_finds_the_costs_of_a_cell_in_virtual_time(policy: Policy) -> None:
    costs = Costs(
        base=0.02,
        row=0.0007,
        draft_base=0.003,
        draft_row=0.0002,
        latency=0.001,
        jitter=0.0,
        kv=2e-6,
        draft_kv=1e-6,
        block=4,
        draft_block=1,
    )
    config = SchedulerConfig(batch_size=4, policy=policy, draft_length=4, max_queued_sequences=1000)
    requests = drawn(8.0, 60, Lengths(300, 1.0, 1000), Lengths(30, 0.5, 100))
    cell = Logged(config, costs, lambda _id, _position: 0.7, requests)
    cell.log, cell.sent = StepLog(), {}
    join_all(cell, 1, 1, 10**5, 10**5)
    cell.run_all()
    target, draft = law_of(cell.log.steps[Role.TARGET]), law_of(cell.log.steps[Role.DRAFT])
    assert (target.step, target.token, target.kv_token) == pytest.approx((0.02, 0.0007, 2e-6), rel=1e-6)
    assert (draft.step, draft.token, draft.kv_token) == pytest.approx((0.003, 0.0002, 1e-6), rel=1e-6)
    assert (target.block_tokens, draft.block_tokens) == (4, 1)
    assert cell.log.accepted / cell.log.tried == pytest.approx(0.7, abs=0.04)


# --- loads and workers ------------------------------------------------------------------------------------------------


def test_prompts_are_cut_and_whole() -> None:
    prompts = TextPrompts([[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    cuts = [prompts.cut(5) for _ in range(4)]
    assert {len(cut) for cut in cuts} == {5}
    assert len({cut[0] for cut in cuts}) == 4
    for cut in cuts:
        assert cut == tuple((cut[0] - 1 + place) % 9 + 1 for place in range(5))
    assert prompts.whole(3, 3) == [(1, 2, 3), (4, 5), (6, 7, 8)]
    assert prompts.whole(5, 9)[3:] == [(1, 2, 3), (4, 5)]


def test_loads_vary_streams_prompts_and_drafts() -> None:
    config, prompts = SchedulerConfig(batch_size=6, draft_length=3), TextPrompts([range(500)])
    loads = list(cost_loads(config, prompts, 100))
    shapes = {(len(load.prompts), len(load.prompts[0]), load.draft_length) for load in loads}
    streams = {(1, 16), (2, 16), (4, 16), (6, 16), (1, 100), (6, 100)}
    assert shapes == {(*shape, length) for shape in streams for length in (0, 2, 3)}
    assert len(answers_load(config, prompts, 100).prompts) == 12


def test_workers_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {3, 4, 6, 7})
    target, draft = pair_launches(configuration_from({"groups": {"target": {"replicas": 2, "threads": 2}}}))
    assert (target.role, target.threads, target.cpus) == (Role.TARGET, 2, (3, 4))
    assert (draft.role, draft.threads, draft.cpus) == (Role.DRAFT, 2, (6, 7))
    assert not target.settings["prefix_cache"]
    crowded = pair_launches(configuration_from({"groups": {"target": {"threads": 4}}}))
    assert [launch.cpus for launch in crowded] == [(), ()]


def test_a_profile_is_part_of_a_plan_file() -> None:
    law = StepLaw(0.0212345678, 0.0041, 1.5e-7, 6, 0.02, 300)
    worker = WorkerProfile("cpu x 1", law, 46_000)
    profile = Profile(worker, worker, 0.61234567, 500, 0.0002, 0.001, 0.00005)
    config = SchedulerConfig(batch_size=6, max_running=48, draft_length=3)
    plan = PlanFile.model_validate({"traffic": {"requests_per_second": 1}, **profile.plan(config)})
    (kind,) = plan.kinds(plan.target)
    assert (kind.step, kind.token, kind.block_tokens, kind.kv_tokens) == (0.02123, 0.0041, 6, 46_000)
    assert plan.acceptance == 0.6123
    assert (plan.scheduling.wire_seconds, plan.scheduling.step_seconds) == (0.0002, 0.001)
    assert plan.scheduling.config(drafting=True).draft_length == 3
    assert WorkerProfile("gpu", replace(law, step=0.0), 46_000).measured()["step_seconds"] > 0
