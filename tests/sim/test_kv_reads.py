"""AUTO where reading KV is a large part of steps: models on GPUs, and prompts of a thousand tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from bench.virtual_time.rates import RateSimulation, rate_of
from deploy.planning.hardware import replica_kind
from deploy.planning.open_loop import OpenLoop, figures, join_all
from deploy.planning.traffic import Lengths, drawn
from deploy.planning.virtual_cell import Costs
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import Role

_TARGET = replica_kind("h100", 8e9, 2, 131_072, 1, 1.0, 0.8, 0.5)
_NEAR, _SLOW = (replica_kind(name, 0.6e9, 2, 114_688, 1, 1.0, 0.8, 0.5) for name in ("h100", "l40s"))
"""8B and 0.6B in bfloat16. KV of a thousand tokens of 64 sequences is six times the draft's weights."""
LAWS = {
    name: Costs(
        _TARGET.step,
        _TARGET.token,
        draft.step,
        draft.token,
        latency=0.0002,
        jitter=0.02,
        kv=_TARGET.kv_token,
        draft_kv=draft.kv_token,
    )
    for name, draft in (("as fast", _NEAR), ("four times as slow", _SLOW))
}
LONGEST = 6


@cache
def rate(law: str, acceptance: float, draft_length: int, batch_size: int, batches: int) -> float:
    sequences = batch_size * batches
    return rate_of(
        LAWS[law],
        lambda _id, _position: acceptance,
        policy=Policy.AUTO,
        draft_length=draft_length,
        batch_size=batch_size,
        sequences=sequences,
        prompt_tokens=1000,
        tokens_each=400,
    ).rate_from_start


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("batch_size", "batches"), [(1, 1), (16, 1), (64, 1), (32, 2)])
@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("law", LAWS)
def test_speculation_never_loses(law: str, acceptance: float, batch_size: int, batches: int) -> None:
    assert rate(law, acceptance, LONGEST, batch_size, batches) >= 0.97 * rate(law, 0.0, 0, batch_size, batches)


@pytest.mark.parametrize(
    ("law", "acceptance", "batch_size", "batches", "gain"),
    [
        ("as fast", 0.8, 16, 1, 1.4),
        ("as fast", 0.5, 32, 2, 1.1),
        ("as fast", 0.8, 32, 2, 1.3),
        ("four times as slow", 0.5, 32, 2, 1.05),
        ("four times as slow", 0.8, 32, 2, 1.1),
    ],
)
def test_drafting_is_not_given_up_for_the_cost_of_kv(
    law: str, acceptance: float, batch_size: int, batches: int, gain: float
) -> None:
    assert rate(law, acceptance, LONGEST, batch_size, batches) > gain * rate(law, 0.0, 0, batch_size, batches)


@pytest.mark.parametrize("law", LAWS)
def test_what_is_learnt_is_the_law(law: str) -> None:
    """By sequences that begin and end at different times, so that steps differ in all that they cost by."""
    costs = replace(LAWS[law], jitter=0.01)
    config = SchedulerConfig(batch_size=16, max_running=32, draft_length=LONGEST)
    simulation = RateSimulation(config, costs, lambda _id, _position: 0.8)
    simulation.join("target", Role.TARGET)
    simulation.join("draft", Role.DRAFT)
    for sequence_id in range(32):
        simulation.submit(sequence_id, 100 + 60 * sequence_id, None, output_tokens=40 + 5 * sequence_id)
    simulation.run(lambda: simulation.emitted_tokens >= 40_000)
    draft, target = sorted(simulation.core.snapshot().workers, key=lambda worker: worker.worker_id)
    # A token's part has that of the KV in it, of sequences of this mean length.
    mean = sum(100 + 60 * number + (40 + 5 * number) / 2 for number in range(32)) / 32
    assert target.base_seconds == pytest.approx(costs.base, rel=0.1)
    assert draft.base_seconds == pytest.approx(costs.draft_base, rel=0.1)
    assert draft.row_seconds == pytest.approx(costs.draft_row + costs.draft_kv * mean, rel=0.35)
    assert costs.row < target.row_seconds < costs.row + costs.kv * mean


@pytest.mark.parametrize("law", LAWS)
def test_more_prompts_than_a_target_can_take_in_are_answered_no_later_than_by_plain_decoding(law: str) -> None:
    """Prompts come all the time, so that nearly every step takes some of one in."""
    requests = drawn(24.0, 250, Lengths(800, 1.0, 8000), Lengths(200, 0.7, 4000))

    def tokens_per_second(draft_length: int) -> float:
        config = SchedulerConfig(
            batch_size=64, max_running=128, draft_length=draft_length, prefill_chunk=512, max_queued_sequences=10**6
        )
        cell = OpenLoop(config, LAWS[law], lambda _id, _position: 0.7, requests)
        join_all(cell, 1, 1, 10**6, 10**6)
        cell.run_all()
        return figures([cell]).tokens_per_second

    assert tokens_per_second(LONGEST) >= 0.97 * tokens_per_second(0)
