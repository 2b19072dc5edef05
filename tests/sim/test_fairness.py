"""One key floods a cell in virtual time; another one's requests wait for little more than the steps under way."""

from __future__ import annotations

import pytest

from bench.virtual_time.rates import CPU, FLAT, STEEP, Costs
from scheduler.config import Policy, SchedulerConfig
from scheduler.key_class import KeyClass
from scheduler.messages import Role
from tests.sim.keyed_load import KeyedLoad

CONFIG = SchedulerConfig(keys=(KeyClass("flood"), KeyClass("single")))
UNNAMED = SchedulerConfig()
GPU = Costs(base=0.015, row=0.00004, draft_base=0.0008, draft_row=0.000005)
"""Like a model of 8 billion parameters."""
SECONDS = 30
REQUESTS = 24


def waits(
    costs: Costs, config: SchedulerConfig, flooded: bool, prompt: int = 200, asked: int = 20, targets: int = 1
) -> tuple[list[float], KeyedLoad]:
    """Of the single requests, one each second, which begin when the flood does. `prompt` tokens are those of the
    flood's prompts, `asked` those of the others."""
    load = KeyedLoad(config, costs)
    for number in range(targets):
        load.join(f"target{number}", Role.TARGET)
    load.join("draft", Role.DRAFT)
    if flooded:
        load.flood(2.0, "flood", 200, prompt, 100)
    for number in range(REQUESTS):
        load.ask(2.05 + number, "single", asked, 10)
    load.run_for(SECONDS)
    return sorted(load.waits.get("single", [])), load


def longest_step(costs: Costs, config: SchedulerConfig) -> float:
    """Seconds of a target's step with a full verify group and a chunk of prefill."""
    tokens = config.batch_size * (1 + config.draft_length) + config.prefill_chunk
    return (costs.base + costs.row * tokens) * (1 + costs.jitter) + 2 * costs.latency


@pytest.mark.parametrize("prompt", [20, 200, 1500])
@pytest.mark.parametrize("costs", [FLAT, CPU], ids=["flat", "cpu"])
def test_a_flood_costs_another_key_a_few_steps(costs: Costs, prompt: int) -> None:
    """The steps that were sent before, one of the flood's turns of prefill, and the request's own."""
    alone, _ = waits(costs, CONFIG, flooded=False)
    flooded, load = waits(costs, CONFIG, flooded=True, prompt=prompt)
    assert (len(alone), len(flooded)) == (REQUESTS, REQUESTS)
    steps = CONFIG.steps_in_flight + 2
    assert flooded[REQUESTS // 2] < alone[REQUESTS // 2] + (steps - 1) * longest_step(costs, CONFIG)
    assert flooded[-1] < alone[-1] + steps * longest_step(costs, CONFIG)
    # No slot is taken but the one that each request needs.
    assert load.core.snapshot().preemptions <= REQUESTS


def test_a_prompt_of_several_chunks_waits_for_few_steps_of_others() -> None:
    """Its chunks ride in consecutive steps, ahead of the flood's prompts. What is left is the step under way, and the
    one queued behind it."""
    alone, _ = waits(GPU, CONFIG, flooded=False, asked=400, targets=2)
    flooded, _ = waits(GPU, CONFIG, flooded=True, prompt=400, asked=400, targets=2)
    assert (len(alone), len(flooded)) == (REQUESTS, REQUESTS)
    assert flooded[-1] <= 1.5 * alone[-1]
    assert flooded[REQUESTS // 2] <= 1.4 * alone[REQUESTS // 2]


def test_without_names_the_same_requests_wait_for_the_whole_queue() -> None:
    flooded, load = waits(FLAT, UNNAMED, flooded=True)
    assert flooded[0] > 20 * longest_step(FLAT, UNNAMED)
    assert load.core.snapshot().preemptions == 0


def test_the_flood_loses_no_more_than_the_other_key_gets() -> None:
    _, fair = waits(FLAT, CONFIG, flooded=True)
    _, unnamed = waits(FLAT, UNNAMED, flooded=True)
    assert fair.tokens["flood"] > 0.97 * unnamed.tokens["flood"]


@pytest.mark.parametrize("policy", [Policy.AUTO, Policy.RAGGED, Policy.EXSPEC])
@pytest.mark.parametrize("costs", [CPU, STEEP], ids=["cpu", "steep"])
def test_two_floods_share_tokens_by_weight(costs: Costs, policy: Policy) -> None:
    """Prompts and output, whatever the requests of each look like."""
    config = SchedulerConfig(policy=policy, keys=(KeyClass("chat", weight=3.0), KeyClass("batch")))
    load = KeyedLoad(config, costs)
    load.join("target", Role.TARGET)
    load.join("draft", Role.DRAFT)
    load.flood(0.0, "chat", 100, 10, 40)
    load.flood(0.0, "batch", 100, 60, 80)
    load.run_for(150.0)
    served = {key.name: key.prompt_tokens + key.output_tokens for key in load.core.snapshot().keys}
    assert served["chat"] + served["batch"] > 4000
    assert served["chat"] / served["batch"] == pytest.approx(3.0, rel=0.05)
