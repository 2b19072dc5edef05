"""The search for the cheapest fleet, against all fleets; and what a fleet costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.planning.fleets import Fleet, Search, System, _least, simulate
from deploy.planning.hardware import GPU_KINDS, replica_kind
from deploy.planning.plan_file import PlanFile

TARGET = {"name": "big", "step_seconds": 0.02, "token_seconds": 0.0004, "kv_tokens": 100_000, "price": 2.0}
SMALL = {"name": "small", "step_seconds": 0.002, "token_seconds": 0.00002, "kv_tokens": 100_000, "price": 0.5}


def plan(**more: Any) -> PlanFile:
    given: dict[str, Any] = {
        "traffic": {"requests_per_second": 12, "prompt_tokens": 60, "output_tokens": 40, "requests": 60},
        "service": {"first_token_seconds": 0.5, "token_seconds": 0.03},
        "target": {"measured": [TARGET]},
        "draft": {"measured": [SMALL, {**TARGET, "step_seconds": 0.002, "token_seconds": 0.00002}]},
        "acceptance": 0.8,
        "scheduling": {"batch_size": 8},
        "max_targets": 4,
    }
    return PlanFile.model_validate(given | more)


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_least_number_that_is_enough_is_found(highest: int, threshold: int) -> None:
    asked: list[int] = []

    def enough(number: int) -> bool:
        asked.append(number)
        return number >= threshold

    assert _least(1, highest, enough) == (threshold if threshold <= highest else None)
    assert all(1 <= number <= highest for number in asked)
    assert len(asked) <= 2 * highest.bit_length() + 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("token_seconds", [0.0205, 0.03, 0.04])
def test_no_fleet_that_was_not_tried_is_cheaper(token_seconds: float) -> None:
    wanted = plan(service={"first_token_seconds": 0.5, "token_seconds": token_seconds})
    requests = wanted.traffic.read()
    (target,), drafts = wanted.kinds(wanted.target), wanted.kinds(wanted.draft)
    fleets = [Fleet(System.PLAIN, target, drafts[0], targets) for targets in range(1, 5)]
    fleets += [Fleet(System.COLOCATED, target, drafts[1], targets) for targets in range(1, 5)]
    fleets += [
        Fleet(System.APART, target, draft, targets, number)
        for draft in drafts
        for targets in range(1, 5)
        for number in range(1, targets + 1)
    ]
    prices: dict[System, list[float]] = {system: [] for system in System}
    for fleet in fleets:
        if simulate(wanted, requests, fleet).keeps(0.5, token_seconds, 99):
            prices[fleet.system].append(fleet.price)
    assert any(prices.values())
    search = Search(wanted, requests, lambda _: None)
    for system, all_prices in prices.items():
        found = search.cheapest(system)
        assert (found.fleet.price if found else None) == min(all_prices, default=None), system


def test_a_fleet_costs_what_its_devices_cost_and_a_million_tokens_their_share() -> None:
    wanted = plan()
    found = Search(wanted, wanted.traffic.read(), lambda _: None).cheapest(System.APART)
    assert found is not None
    assert found.fleet.price == 2.0 * found.fleet.targets + 0.5 * found.fleet.drafts
    tokens_an_hour = found.figures.tokens_per_second * 3600
    assert found.price_per_million == pytest.approx(found.fleet.price / tokens_an_hour * 1_000_000)


def test_every_fleet_that_is_tried_is_told_once() -> None:
    said: list[str] = []
    wanted = plan()
    Search(wanted, wanted.traffic.read(), said.append).cheapest(System.APART)
    assert said
    assert len(set(said)) == len(said)


def test_a_device_is_as_fast_as_its_roofline() -> None:
    """An 8B model in bfloat16 on one H100 at all of its data sheet: 16 GB at 3.35 TB/s, 16 GFLOP at 989 TFLOP/s."""
    kind = replica_kind("h100", 8e9, 2, 131_072, 1, 2.5, 1.0, 1.0)
    assert kind.step == pytest.approx(4.776e-3, rel=1e-3)
    assert kind.token == pytest.approx(1.6178e-5, rel=1e-3)
    assert kind.kv_token == pytest.approx(3.913e-8, rel=1e-3)
    assert kind.kv_tokens == pytest.approx(0.9 * (80e9 - 16e9) / 131_072, rel=1e-3)
    two = replica_kind("h100", 8e9, 2, 131_072, 2, 2.5, 1.0, 1.0)
    assert (two.step, two.price) == (pytest.approx(kind.step / 2), 5.0)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"140\.0 GB of weights leave no room for KV on 1 x h100 with 80 GB"):
        replica_kind("h100", 70e9, 2, 327_680, 1, 1.0, 1.0, 1.0)
    assert replica_kind("h100", 70e9, 2, 327_680, 2, 1.0, 1.0, 1.0).kv_tokens > 10_000


def test_every_kind_of_gpu_has_sensible_figures() -> None:
    for name, kind in GPU_KINDS.items():
        assert 10e9 < kind.memory < 1e12, name
        assert 0.1e12 < kind.bandwidth < 20e12, name
        assert 50 < kind.operations / kind.bandwidth < 1000, name


def test_a_trace_is_found_beside_the_file(tmp_path: Path) -> None:
    from deploy.planning.plan_file import read_plan_file

    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 9, "output_length": 3}\n' * 3)
    (tmp_path / "plan.yaml").write_text(
        "traffic: {trace: trace.jsonl, requests: 50}\nacceptance: 0.5\n"
        "target: {parameters: 8e9, kv_bytes_per_token: 131072, gpus: [h100]}\n"
        "draft: {parameters: 6e8, kv_bytes_per_token: 114688, gpus: [h100, l4]}\n"
    )
    found = read_plan_file(tmp_path / "plan.yaml")
    assert [request.prompt_tokens for request in found.traffic.read()] == [9, 9, 9]
    assert [kind.name for kind in found.kinds(found.draft)] == ["h100", "l4"]
