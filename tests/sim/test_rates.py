"""AUTO against plain decoding and against every fixed draft length, on cells whose costs and acceptances are known."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from bench.virtual_time.rates import (
    CPU,
    FLAT,
    KERNELS,
    SHARED_CPU,
    SLOW_DRAFT,
    STEEP,
    AcceptanceOf,
    Costs,
    Measured,
    RateSimulation,
    rate_of,
)
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import Role

LAWS = {"flat": FLAT, "steep": STEEP, "cpu": CPU, "slow draft": SLOW_DRAFT, "shared": SHARED_CPU, "kernels": KERNELS}
ACCEPTANCES: dict[str, AcceptanceOf] = {
    **{str(rate): lambda _id, _position, rate=rate: rate for rate in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)},
    "mixed": lambda sequence_id, _: (0.05, 0.3, 0.6, 0.9)[sequence_id % 4],
}
LONGEST = 4
NEVER_LESS = 0.97
OF_THE_BEST = 0.88


def crowd(batch_size: int, batches: int) -> dict[str, int]:
    """Long enough runs for what is asserted; shorter ones where many sequences average more."""
    sequences = batch_size * batches
    return {"batch_size": batch_size, "sequences": sequences, "tokens_each": 400 if sequences <= 8 else 200}


def auto(law: str, acceptance: str, batch_size: int, batches: int) -> Measured:
    costs, chance = LAWS[law], ACCEPTANCES[acceptance]
    return rate_of(costs, chance, policy=Policy.AUTO, draft_length=LONGEST, **crowd(batch_size, batches))


@cache
def plain(law: str, batch_size: int, batches: int) -> float:
    """The better of two ways to decode plainly: oldest rows first, and as AUTO groups."""
    chance = ACCEPTANCES["0.0"]
    return max(
        rate_of(LAWS[law], chance, policy=policy, draft_length=0, **crowd(batch_size, batches)).rate
        for policy in (Policy.RAGGED, Policy.AUTO)
    )


def best_fixed(law: str, acceptance: str, batch_size: int, batches: int) -> float:
    """Over all draft lengths, 0 among them: with the oldest rows first, and with AUTO's groups."""
    costs, chance, sizes = LAWS[law], ACCEPTANCES[acceptance], crowd(batch_size, batches)
    rates = [plain(law, batch_size, batches)]
    for length in range(1, LONGEST + 1):
        rates.append(rate_of(costs, chance, policy=Policy.RAGGED, draft_length=length, **sizes).rate)
        rates.append(rate_of(costs, chance, policy=Policy.AUTO, draft_length=LONGEST, requested=length, **sizes).rate)
    return max(rates)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("batch_size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("law", LAWS)
def test_speculation_never_loses(law: str, batch_size: int) -> None:
    for acceptance in ACCEPTANCES:
        rate = auto(law, acceptance, batch_size, 1).rate
        assert rate >= NEVER_LESS * plain(law, batch_size, 1), acceptance


@pytest.mark.parametrize(("acceptance", "batches"), [("0.3", 1), ("0.9", 1), ("0.9", 4), ("mixed", 4)])
def test_steps_that_are_to_be_alone_are(acceptance: str, batches: int) -> None:
    """But for one now and then that runs when the plan changes."""
    assert auto("shared", acceptance, 8, batches).disturbed_steps <= 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("law", LAWS)
def test_speculation_never_loses_in_a_large_pool(law: str) -> None:
    for acceptance in ACCEPTANCES:
        rate = auto(law, acceptance, 8, 4).rate
        assert rate >= NEVER_LESS * plain(law, 8, 4), acceptance


@pytest.mark.sampled(7)
@pytest.mark.parametrize("batch_size", [1, 4, 8])
@pytest.mark.parametrize("acceptance", ["0.1", "0.5", "0.7", "0.9"])
@pytest.mark.parametrize("law", ["cpu", "shared", "kernels"])
def test_speculation_never_loses_on_short_answers_to_long_prompts(law: str, acceptance: str, batch_size: int) -> None:
    """The draft has to take in every prompt too, and only few tokens can make up for that."""
    sizes = {"prompt_tokens": 400, "output_tokens": 64, "sequences": 2 * batch_size, "batch_size": batch_size}
    chance, costs = ACCEPTANCES[acceptance], LAWS[law]
    sizes["tokens_each"] = 640 if batch_size == 1 else 320
    without = rate_of(costs, chance, policy=Policy.AUTO, draft_length=0, **sizes).rate
    rate = rate_of(costs, chance, policy=Policy.AUTO, draft_length=LONGEST, **sizes).rate
    assert rate >= NEVER_LESS * without


@pytest.mark.sampled(11, 2)
@pytest.mark.parametrize(("batch_size", "batches"), [(1, 1), (8, 1), (4, 4)])
@pytest.mark.parametrize("acceptance", ["0.3", "0.9", "mixed"])
@pytest.mark.parametrize("law", LAWS)
def test_no_fixed_length_is_much_better(law: str, acceptance: str, batch_size: int, batches: int) -> None:
    rate = auto(law, acceptance, batch_size, batches).rate
    assert rate >= OF_THE_BEST * best_fixed(law, acceptance, batch_size, batches)


@pytest.mark.parametrize(("law", "gain"), [("flat", 2.0), ("cpu", 1.6), ("slow draft", 1.1), ("steep", 1.2)])
def test_a_single_stream_gains_where_the_draft_is_good(law: str, gain: float) -> None:
    assert auto(law, "0.9", 1, 1).rate > gain * plain(law, 1, 1)


def test_a_poor_draft_is_left_alone_but_for_probes() -> None:
    outcome = auto("cpu", "0.1", 8, 1)
    rounds = sum(outcome.snapshot.draft_lengths.values())
    assert outcome.snapshot.plain_rounds > 0.97 * rounds
    assert 0 < outcome.snapshot.probes < 0.03 * rounds
    assert outcome.rate_from_start > 0.85 * plain("cpu", 8, 1)


def test_each_sequence_drafts_by_its_own_acceptance() -> None:
    """Among many, half of them hopeless: fixed lengths lose on one half or on the other."""

    def chance(sequence_id: int, _position: int) -> float:
        return 0.9 if sequence_id % 2 else 0.0

    costs, sizes = replace(CPU, row=0.003), crowd(4, 4)
    own = rate_of(costs, chance, policy=Policy.AUTO, draft_length=LONGEST, **sizes).rate
    for length in range(LONGEST + 1):
        assert own > 1.1 * rate_of(costs, chance, policy=Policy.RAGGED, draft_length=length, **sizes).rate


@pytest.mark.parametrize("sequences", [1, 4])
def test_probes_notice_that_drafts_have_become_good(sequences: int) -> None:
    def chance(_id: int, position: int) -> float:
        return 0.0 if position < 150 else 0.9

    outcome = rate_of(
        CPU, chance, policy=Policy.AUTO, draft_length=LONGEST, batch_size=4, sequences=sequences, tokens_each=700
    )
    lengths = outcome.snapshot.draft_lengths
    assert sum(count for length, count in lengths.items() if length >= 3) > 50 * sequences
    # Plain decoding alone would take as many rounds as tokens.
    assert sum(lengths.values()) < 0.7 * 700 * sequences


def test_drafts_that_have_become_bad_are_given_up() -> None:
    def chance(_id: int, position: int) -> float:
        return 0.9 if position < 150 else 0.0

    def rate(draft_length: int) -> float:
        sizes = {"batch_size": 4, "sequences": 4, "tokens_each": 600, "learning": 200}
        return rate_of(CPU, chance, policy=Policy.AUTO, draft_length=draft_length, **sizes).rate

    assert rate(LONGEST) >= NEVER_LESS * rate(0)


@pytest.mark.parametrize("seed", range(3))
def test_slow_steps_do_not_lead_astray(seed: int) -> None:
    """One step in fifty takes twenty times as long: what is chosen must be what pays without them."""

    def chosen(costs: Costs, acceptance: float) -> float:
        outcome = rate_of(
            costs,
            lambda _id, _position: acceptance,
            policy=Policy.AUTO,
            draft_length=LONGEST,
            batch_size=8,
            sequences=8,
            tokens_each=200,
            seed=seed,
        )
        return outcome.snapshot.plain_rounds / sum(outcome.snapshot.draft_lengths.values())

    assert chosen(replace(FLAT, slow_share=0.02), 0.8) < 0.3
    assert chosen(replace(STEEP, slow_share=0.02), 0.3) > 0.9


@pytest.mark.parametrize(("targets", "drafts"), [(2, 1), (1, 2), (3, 2)])
def test_several_workers(targets: int, drafts: int) -> None:
    workers = {"targets": targets, "drafts": drafts}
    sizes = {"batch_size": 4, "sequences": 12 * targets, "tokens_each": 150}
    for acceptance in ("0.1", "0.8"):
        chance: AcceptanceOf = lambda _id, _position, rate=float(acceptance): rate  # noqa: E731
        without = rate_of(CPU, chance, policy=Policy.AUTO, draft_length=0, **sizes, **workers).rate
        rate = rate_of(CPU, chance, policy=Policy.AUTO, draft_length=LONGEST, **sizes, **workers).rate
        assert rate >= (NEVER_LESS if acceptance == "0.1" else 1.2) * without


@pytest.mark.parametrize(("law", "acceptance"), [("kernels", "0.9"), ("cpu", "0.5")])
def test_a_crowd_is_not_held_up_by_the_one_before_it(law: str, acceptance: str) -> None:
    """One sequence that drafts, then fifteen prompts at once, for which that does not pay."""

    def seconds(draft_length: int) -> float:
        simulation = cell(LAWS[law], ACCEPTANCES[acceptance], 16, draft_length)
        simulation.submit(0, 100, None)
        simulation.run(lambda: simulation.emitted_tokens >= 1000)
        began = simulation.now
        for sequence_id in range(1, 16):
            simulation.submit(sequence_id, 400, None)
        simulation.run(lambda: simulation.emitted_tokens >= 1000 + 16 * 20)
        return simulation.now - began

    assert seconds(LONGEST) <= seconds(0) / NEVER_LESS


def cell(costs: Costs, acceptance: AcceptanceOf, batch_size: int, draft_length: int = LONGEST) -> RateSimulation:
    """One target and one draft."""
    config = SchedulerConfig(batch_size=batch_size, max_running=64, policy=Policy.AUTO, draft_length=draft_length)
    simulation = RateSimulation(config, costs, acceptance)
    simulation.join("target", Role.TARGET)
    simulation.join("draft", Role.DRAFT)
    return simulation


SETTLED, SOON, MEASURED = 150, 50, 150
"""Rounds of each sequence: before a change, in which to adapt to the change, and of the measurement after that."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("change", ["eight times the load", "a draft that goes wrong", "a draft twice as slow"])
def test_after_a_sudden_change_the_new_best_is_found_within_fifty_rounds(law: str, change: str) -> None:
    def rate(requested: int | None) -> float:
        acceptance = 0.8
        simulation = cell(LAWS[law], lambda _id, _position: acceptance, 8)
        sequences = 1 if change == "eight times the load" else 4
        for sequence_id in range(sequences):
            simulation.submit(sequence_id, 30, requested)
        run_for(simulation, SETTLED * sequences)
        if change == "eight times the load":
            for sequence_id in range(sequences, 8 * sequences):
                simulation.submit(sequence_id, 30, requested)
            sequences *= 8
        elif change == "a draft that goes wrong":
            acceptance = 0.1
        else:
            slow = {"draft_base": 2 * simulation.costs.draft_base, "draft_row": 2 * simulation.costs.draft_row}
            simulation.costs = replace(simulation.costs, **slow)
        run_for(simulation, SOON * sequences)
        began, before = simulation.now, simulation.emitted_tokens
        run_for(simulation, MEASURED * sequences)
        return (simulation.emitted_tokens - before) / (simulation.now - began)

    assert rate(None) >= 0.9 * max(map(rate, range(LONGEST + 1)))


def run_for(simulation: RateSimulation, rounds: int) -> None:
    until = simulation.rounds + rounds
    simulation.run(lambda: simulation.rounds >= until)


@pytest.mark.parametrize("law", ["cpu", "flat"])
def test_each_of_two_draft_models_gets_its_own_lengths(law: str) -> None:
    """Answers are too short to learn from each of them anew what its draft is worth."""
    config = SchedulerConfig(batch_size=8, max_running=8, policy=Policy.AUTO, draft_length=LONGEST)
    simulation = RateSimulation(config, LAWS[law], lambda _id, _position: 1.0)
    simulation.join("target", Role.TARGET)
    simulation.join("good", Role.DRAFT, quality=0.9)
    simulation.join("poor", Role.DRAFT, quality=0.1)
    for sequence_id in range(8):
        simulation.submit(sequence_id, 10, None, output_tokens=24)
    simulation.run(lambda: simulation.emitted_tokens >= 2_000)
    before = {name: Counter(simulation.asked(name)) for name in ("good", "poor")}
    simulation.run(lambda: simulation.emitted_tokens >= 12_000)
    good, poor = (simulation.asked(name) - before[name] for name in ("good", "poor"))
    assert sum(count for length, count in good.items() if length >= 3) > 0.5 * good.total()
    assert poor.total() < 0.1 * good.total()


def test_a_draft_worker_is_left_in_peace_while_nobody_drafts() -> None:
    """Sequences that decode plainly are not kept up to date on the draft: only probes catch up."""
    outcome = auto("steep", "0.0", 4, 1)
    assert outcome.other_steps < 0.15 * outcome.verify_steps
