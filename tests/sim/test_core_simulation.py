"""The scheduler core against model workers in virtual time: whatever happens, the output is plain decoding's."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from scheduler.config import KvMovement, Policy, SchedulerConfig
from scheduler.key_class import KeyClass
from scheduler.messages import (
    FailSequence,
    FinishSequence,
    Role,
    Row,
    RowResult,
    RowStatus,
    SequenceRequest,
    WorkerSpec,
)
from tests.sim.model import VOCABULARY, ModelWorker, plain_decoding
from tests.sim.simulation import Simulation


@dataclass(frozen=True)
class Scenario:
    seed: int
    policy: Policy
    batch_size: int
    max_running: int
    draft_length: int
    prefill_chunk: int
    steps_in_flight: int
    sequences: int
    targets: int
    drafts: int
    short_sighted: bool
    shares: bool
    acceptance: float
    longest_prompt: int
    most_tokens: int
    page_size: int
    spare_pages: int
    packed_rows: int
    losses: int
    drains: int
    kv_movement: KvMovement
    cancels: int
    faults: bool
    late_workers: bool
    planning_lag: float = 0.0
    draft_ahead: int = 0
    keys: int = 0


scenarios = st.builds(
    Scenario,
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(Policy),
    batch_size=st.integers(1, 6),
    max_running=st.sampled_from([1, 3, 8, 16, 64]),
    draft_length=st.integers(0, 7),
    prefill_chunk=st.sampled_from([1, 2, 5, 16, 64]),
    steps_in_flight=st.integers(1, 3),
    sequences=st.integers(1, 24),
    targets=st.integers(1, 3),
    drafts=st.integers(0, 3),
    short_sighted=st.booleans(),
    shares=st.booleans(),
    acceptance=st.sampled_from([0.0, 0.4, 0.7, 0.95, 1.0]),
    longest_prompt=st.sampled_from([1, 4, 30, 120]),
    most_tokens=st.sampled_from([1, 2, 9, 30]),
    page_size=st.sampled_from([1, 4, 16]),
    spare_pages=st.sampled_from([0, 1, 10, 1000]),
    packed_rows=st.sampled_from([2, 3, 8, 24, 256]),
    losses=st.integers(0, 3),
    drains=st.integers(0, 3),
    kv_movement=st.sampled_from(KvMovement),
    cancels=st.integers(0, 4),
    faults=st.booleans(),
    late_workers=st.booleans(),
    planning_lag=st.sampled_from([0.0, 0.0005, 0.004]),
    draft_ahead=st.sampled_from([0, 1, 4, 8]),
    keys=st.sampled_from([0, 0, 1, 3]),
)


def few_faults(rng: random.Random, most_per_sequence: int = 3):
    """Workers that now and then lose KV, run short of pages or fail a draft row; never often enough to give up."""
    counts: dict[int, int] = {}

    def fault(worker: ModelWorker, row: Row) -> RowResult | None:
        if rng.random() > 0.1 or counts.get(row.sequence_id, 0) >= most_per_sequence:
            return None
        counts[row.sequence_id] = counts.get(row.sequence_id, 0) + 1
        kind = rng.randrange(4)
        held = worker.held.get(row.sequence_id)
        if kind == 0:
            worker.forget(row.sequence_id)
            return RowResult(row.sequence_id, RowStatus.UNKNOWN_SEQUENCE, 0, 0)
        if kind == 1 and held is not None:
            length = rng.randrange(len(held.tokens) + 1)
            held.tokens.truncate(length)
            if not worker.short_sighted:
                worker.pool.truncate(held.table, length)
            return RowResult(row.sequence_id, RowStatus.KV_MISMATCH, length, held.tokens.digest(length))
        if kind == 2 and (held is not None or row.opening is None):
            return RowResult(row.sequence_id, RowStatus.OUT_OF_PAGES, 0, 0)
        if kind == 3 and worker.spec.role is Role.DRAFT:
            worker.forget(row.sequence_id)
            return RowResult(row.sequence_id, RowStatus.FAILED, 0, 0, error="injected")
        return None

    return fault


def keys_of(scenario: Scenario) -> tuple[KeyClass, ...]:
    """From a generator of their own: examples without keys take the course that they always took."""
    rng = random.Random(f"keys of {scenario.seed}")
    return tuple(
        KeyClass(f"key{number}", rng.choice((0.25, 1.0, 4.0)), max_running=rng.choice((None, 1, 4)))
        for number in range(scenario.keys)
    )


def with_key(request: SequenceRequest, scenario: Scenario) -> SequenceRequest:
    if not scenario.keys:
        return request
    rng = random.Random(f"key of {request.sequence_id} in {scenario.seed}")
    return replace(request, key=f"key{rng.randrange(scenario.keys + 1)}", priority=rng.randint(-1, 1))


def build(scenario: Scenario) -> Simulation:
    rng = random.Random(scenario.seed)
    config = SchedulerConfig(
        batch_size=scenario.batch_size,
        max_running=scenario.max_running,
        policy=scenario.policy,
        draft_length=scenario.draft_length,
        draft_ahead=scenario.draft_ahead,
        prefill_chunk=scenario.prefill_chunk,
        steps_in_flight=scenario.steps_in_flight,
        max_queued_sequences=1000,
        kv_movement=scenario.kv_movement,
        keys=keys_of(scenario),
    )
    ample = scenario.spare_pages == 1000
    simulation = Simulation(config, seed=scenario.seed, ample=ample, planning_lag=scenario.planning_lag)
    longest = scenario.longest_prompt + scenario.most_tokens
    pages = -(-longest // scenario.page_size) + scenario.spare_pages + (longest * 30 if ample else 0)
    workers = []
    for role, count in ((Role.TARGET, scenario.targets), (Role.DRAFT, scenario.drafts)):
        for index in range(count):
            length = longest if role is Role.TARGET else rng.choice([longest, longest, max(1, longest // 2)])
            spec = WorkerSpec(f"{role.value}{index}", role, scenario.page_size, pages, length, scenario.packed_rows)
            workers.append((spec, role is Role.DRAFT and scenario.short_sighted and index % 2 == 0))

    def join(time: float, spec: WorkerSpec, short_sighted: bool) -> None:
        simulation.join(time, ModelWorker(spec, scenario.acceptance, short_sighted, scenario.shares))

    for spec, short_sighted in workers:
        join(rng.uniform(0, 0.3) if scenario.late_workers else 0.0, spec, short_sighted)
    for sequence_id in range(scenario.sequences):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, scenario.longest_prompt)))
        request = SequenceRequest(
            sequence_id,
            prompt,
            max_tokens=rng.randint(1, scenario.most_tokens),
            stop_token_ids=frozenset(rng.sample(range(VOCABULARY), rng.choice([0, 0, 1, 5]))),
            draft_length=rng.choice([None, None, None, 0, 1, 6]),
            logits_digests=True,
        )
        simulation.submit(rng.uniform(0, 0.5), with_key(request, scenario))
    for _ in range(scenario.cancels):
        simulation.cancel(rng.uniform(0, 1.0), rng.randrange(scenario.sequences))
    for _ in range(scenario.losses):
        spec, short_sighted = rng.choice(workers)
        time = rng.uniform(0, 1.0)
        if rng.random() < 0.7:
            simulation.lose(time, spec.worker_id)
        join(time + rng.choice([0.0, 0.01, 0.3]), spec, short_sighted)
    for _ in range(scenario.drains):
        spec, short_sighted = rng.choice(workers)
        time = rng.uniform(0, 1.0)
        simulation.drain(time, spec.worker_id)
        join(time + rng.choice([0.1, 0.5, 1.0]), spec, short_sighted)
    if scenario.faults:
        simulation.fault = few_faults(rng)
    return simulation


PREEMPTED_WITHOUT_A_STEP = Scenario(
    seed=8984,
    policy=Policy.AUTO,
    batch_size=3,
    max_running=8,
    draft_length=7,
    prefill_chunk=16,
    steps_in_flight=3,
    sequences=12,
    targets=2,
    drafts=0,
    short_sighted=True,
    shares=False,
    acceptance=0.0,
    longest_prompt=120,
    most_tokens=30,
    page_size=1,
    spare_pages=0,
    packed_rows=2,
    losses=2,
    drains=0,
    kv_movement=KvMovement.AUTO,
    cancels=1,
    faults=False,
    late_workers=False,
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenarios)
@example(PREEMPTED_WITHOUT_A_STEP)
def test_output_is_that_of_plain_decoding_whatever_happens(scenario: Scenario) -> None:
    simulation = build(scenario)
    simulation.run()
    simulation.check_end()
    # A sequence can be alone on two targets that are lost; `check_end` has seen that it was.
    assert all(isinstance(output.end, (FinishSequence, FailSequence)) for output in simulation.outputs.values())


@pytest.mark.parametrize("policy", list(Policy))
def test_three_hundred_sequences_pass_through_pages_for_forty(policy: Policy) -> None:
    rng = random.Random(7)
    config = SchedulerConfig(policy=policy, max_running=128, batch_size=8, draft_length=3, prefill_chunk=32)
    simulation = Simulation(config, seed=1, ample=False)
    mean_length, page_size = 89, 8
    pages = 40 * mean_length // page_size
    simulation.join(0.0, ModelWorker(WorkerSpec("target", Role.TARGET, page_size, pages, 1000, 128)))
    simulation.join(0.0, ModelWorker(WorkerSpec("draft", Role.DRAFT, page_size, pages // 2, 1000, 128), 0.8))
    for sequence_id in range(300):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 5, 20, 90])))
        simulation.submit(rng.uniform(0, 1), SequenceRequest(sequence_id, prompt, rng.choice([1, 8, 30, 200])))
    simulation.run()
    assert all(isinstance(output.end, FinishSequence) for output in simulation.outputs.values())
    for output in simulation.outputs.values():
        assert output.tokens == plain_decoding(output.request)[0]
    simulation.core.check_integrity()
    if policy is not Policy.EQSPEC:  # a cohort of one batch is too small to run out of pages
        assert simulation.core.snapshot().preemptions > 0


@pytest.mark.parametrize("policy", list(Policy))
def test_a_busy_cell_keeps_its_rules(policy: Policy) -> None:
    config = SchedulerConfig(policy=policy, max_running=48, batch_size=4, prefill_chunk=32)
    simulation = Simulation(config, seed=11)
    simulation.join(0.0, ModelWorker(WorkerSpec("target", Role.TARGET, 16, 10_000, 1000, 256)))
    simulation.join(0.0, ModelWorker(WorkerSpec("draft", Role.DRAFT, 16, 10_000, 1000, 256), 0.7))
    rng = random.Random(11)
    for sequence_id in range(60):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40)))
        simulation.submit(rng.uniform(0, 1), SequenceRequest(sequence_id, prompt, 60, logits_digests=True))
    simulation.run()
    simulation.check_end()


@pytest.mark.parametrize("policy", list(Policy))
def test_a_cancelled_sequence_is_off_every_worker_within_a_second(policy: Policy) -> None:
    config = SchedulerConfig(policy=policy, max_running=16, batch_size=4)
    simulation = Simulation(config, seed=3)
    target = ModelWorker(WorkerSpec("target", Role.TARGET, 4, 1000, 1000, 128))
    draft = ModelWorker(WorkerSpec("draft", Role.DRAFT, 4, 1000, 1000, 128), 0.8)
    simulation.join(0.0, target)
    simulation.join(0.0, draft)
    for sequence_id in range(12):
        simulation.submit(0.0, SequenceRequest(sequence_id, (1, 2, sequence_id), 400, logits_digests=True))

    def check(sequence_id: int) -> None:
        assert sequence_id not in target.held
        assert sequence_id not in draft.held

    for sequence_id in range(12):
        time = 0.05 + 0.037 * sequence_id
        simulation.cancel(time, sequence_id)
        simulation.at(time + 1.0, lambda gone=sequence_id: check(gone))
    simulation.run()
    simulation.check_end()


def verify_rows_sent(simulation: Simulation) -> list[tuple[float, tuple[int, ...]]]:
    return [
        (time, tuple(row.sequence_id for row in step.rows[: step.group.rows]))
        for time, step in simulation.sent
        if step.group is not None
    ]


def test_a_lone_odd_sequence_is_not_starved_by_a_crowd_of_equals() -> None:
    """The paper's tail: equal-length groups keep forming, and one sequence never finds a partner."""
    config = SchedulerConfig(policy=Policy.EXSPEC, max_running=64, batch_size=4, draft_length=0, wait_bound_steps=1.5)
    simulation = Simulation(config, seed=5)
    simulation.join(0.0, ModelWorker(WorkerSpec("target", Role.TARGET, 16, 10_000, 1000, 256)))
    for sequence_id in range(24):
        simulation.submit(0.0, SequenceRequest(sequence_id, (1,) * 10, 120, logits_digests=True))
    simulation.submit(0.0, SequenceRequest(99, (1,) * 33, 60, logits_digests=True))
    simulation.run()
    simulation.check_end()
    times = [time for time, rows in verify_rows_sent(simulation) if 99 in rows]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    step = 0.01 + 0.0002 * 4
    # Its turn comes after six groups of the others; then 1.5 steps, the two steps in flight, and jitter.
    assert max(gaps) < (6 + 1.5 + 2 + 1.5) * step * 1.2


@pytest.mark.parametrize("movement", list(KvMovement))
@pytest.mark.parametrize("policy", list(Policy))
def test_targets_that_drain_one_after_the_other_lose_nothing(policy: Policy, movement: KvMovement) -> None:
    config = SchedulerConfig(
        policy=policy, max_running=3, batch_size=4, kv_movement=movement, initial_step_seconds=0.01
    )
    simulation = Simulation(config, seed=13, ample=False)
    specs = [WorkerSpec(f"target{index}", Role.TARGET, 4, 400, 1000, 64) for index in range(3)]
    for spec in specs:
        simulation.join(0.0, ModelWorker(spec))
    simulation.join(0.0, ModelWorker(WorkerSpec("draft", Role.DRAFT, 4, 4000, 1000, 128), 0.7))
    rng = random.Random(13)
    for sequence_id in range(40):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([2, 20, 90])))
        simulation.submit(rng.uniform(0, 2), SequenceRequest(sequence_id, prompt, 100, logits_digests=True))
    for index in range(12):
        time = 0.3 + 0.25 * index
        simulation.drain(time, specs[index % 3].worker_id)
        simulation.join(time + 0.2, ModelWorker(specs[index % 3]))
    simulation.run()
    simulation.check_end()
    moves = simulation.core.snapshot().moves
    assert (moves.moves > 5) == (movement is not KvMovement.NEVER), moves
    assert movement is not KvMovement.NEVER or moves.rehomed, moves
