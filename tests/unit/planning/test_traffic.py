"""Requests drawn at random: what their description says of them."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from deploy.planning.traffic import Lengths, PlannedRequest, SharedBeginning, drawn, faster

PROMPT, OUTPUT = Lengths(400, 1.0, 100_000), Lengths(120, 0.5, 100_000)


def test_arrivals_are_a_poisson_process_of_that_rate() -> None:
    """Its gaps have a standard deviation as large as their mean."""
    times = [0.0, *(request.arrival for request in drawn(5.0, 20_000, PROMPT, OUTPUT))]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.03)


@pytest.mark.parametrize("lengths", [PROMPT, OUTPUT, Lengths(400, 0.0, 1000)])
def test_lengths_have_the_mean_and_the_spread_that_were_asked_for(lengths: Lengths) -> None:
    rng = random.Random(1)
    found = [lengths.draw(rng) for _ in range(40_000)]
    assert statistics.fmean(found) == pytest.approx(lengths.mean, rel=0.03)
    assert statistics.pstdev(found) == pytest.approx(lengths.mean * lengths.variation, rel=0.06)


def test_no_length_is_out_of_bounds() -> None:
    rng, lengths = random.Random(1), Lengths(3, 3.0, 10)
    found = {lengths.draw(rng) for _ in range(5000)}
    assert found == set(range(1, 11))


def test_the_same_seed_draws_the_same_requests_and_another_one_does_not() -> None:
    assert drawn(2.0, 50, PROMPT, OUTPUT, seed=3) == drawn(2.0, 50, PROMPT, OUTPUT, seed=3)
    assert drawn(2.0, 50, PROMPT, OUTPUT, seed=3) != drawn(2.0, 50, PROMPT, OUTPUT, seed=4)


def test_prompts_share_what_their_blocks_say_and_nothing_else() -> None:
    requests = [
        PlannedRequest(0.0, 10, 1, (4, 5), 4),
        PlannedRequest(0.0, 10, 1, (4, 6), 4),
        PlannedRequest(0.0, 10, 1, (5, 4), 4),
        PlannedRequest(0.0, 10, 1),
    ]
    prompts = [request.prompt(number) for number, request in enumerate(requests)]
    assert [len(prompt) for prompt in prompts] == [10] * 4
    assert prompts[0][:4] == prompts[1][:4]
    assert prompts[0][4:8] == prompts[2][:4]
    for place, one in enumerate(prompts):
        for other in prompts[place + 1 :]:
            assert not set(one[8:]) & set(other[8:])
    assert not set(prompts[3]) & set(prompts[0])


def test_a_prompt_shorter_than_its_blocks_is_cut() -> None:
    assert len(PlannedRequest(0.0, 700, 1, (1, 2), 512).prompt(0)) == 700


def test_shared_beginnings_are_as_frequent_as_was_asked_for() -> None:
    requests = drawn(1.0, 10_000, PROMPT, OUTPUT, SharedBeginning(0.6, 4, 256))
    with_one = [request for request in requests if request.blocks]
    assert len(with_one) / len(requests) == pytest.approx(0.6, abs=0.02)
    for beginning in range(4):
        assert sum(request.blocks == (beginning,) for request in with_one) / len(with_one) == pytest.approx(
            0.25, abs=0.02
        )
    assert statistics.fmean(request.prompt_tokens for request in with_one) == pytest.approx(656, rel=0.05)


def test_twice_as_fast_halves_the_times() -> None:
    requests = drawn(1.0, 20, PROMPT, OUTPUT)
    for before, after in zip(requests, faster(requests, 2.0), strict=True):
        assert after.arrival == pytest.approx(before.arrival / 2)
        assert (after.prompt_tokens, after.output_tokens) == (before.prompt_tokens, before.output_tokens)
