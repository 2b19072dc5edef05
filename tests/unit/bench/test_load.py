"""Arrivals, percentiles and what counts as good: the parts of `spool bench serve` that need no server."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from bench.serving.clients import RefusedError, RequestFailedError
from bench.serving.load import Ending, LatencyBound, RequestRecord, percentile, poisson_arrivals, summarise_load
from bench.serving.run import run_load
from deploy.offline.prompts import Prompt
from deploy.progress import LineReporter, error_console
from tests.support.waiting import LONG

BOUND = LatencyBound(first_token=1.0, per_token=0.1)


def answered(due: float, *deliveries: float, tokens: int) -> RequestRecord:
    return RequestRecord(due, due, deliveries[-1], Ending.ANSWERED, "", tokens, list(deliveries))


def test_arrivals_are_a_poisson_process() -> None:
    times = poisson_arrivals(20.0, 200.0, seed=1)
    assert times == sorted(times)
    assert all(0 <= time < 200 for time in times)
    assert abs(len(times) - 4000) < 5 * math.sqrt(4000)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert stats.kstest(gaps, "expon", args=(0, 1 / 20)).pvalue > 0.001
    counts = np.histogram(times, bins=200, range=(0, 200))[0]
    assert statistics.variance(counts.tolist()) / statistics.mean(counts.tolist()) == pytest.approx(1, abs=0.4)


def test_arrivals_depend_on_the_seed_alone() -> None:
    assert poisson_arrivals(5.0, 10.0, seed=3) == poisson_arrivals(5.0, 10.0, seed=3)
    assert poisson_arrivals(5.0, 10.0, seed=3) != poisson_arrivals(5.0, 10.0, seed=4)
    with pytest.raises(ValueError, match="rate is 0, must be above 0"):
        poisson_arrivals(0, 1.0, seed=0)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("percent", [0, 50, 90, 99, 100])
def test_percentiles_are_numpys(count: int, percent: int) -> None:
    values = [(7 * place) % 13 * 0.5 for place in range(count)]
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="values is empty"):
        percentile([], 50)


def test_times_count_from_the_arrival_not_from_the_sending() -> None:
    record = RequestRecord(2.0, 2.5, 4.0, Ending.ANSWERED, "", 5, [3.0, 3.5, 4.0])
    assert record.first_token_seconds == 1.0
    assert record.seconds_per_token == 0.25
    assert record.gaps == [0.5, 0.5]


def test_good_requests_keep_both_bounds() -> None:
    good = answered(0.0, 1.0, 1.4, tokens=5)
    assert BOUND.kept_by(good)
    assert not BOUND.kept_by(answered(0.0, 1.1, 1.2, tokens=5))
    assert not BOUND.kept_by(answered(0.0, 0.5, 1.0, tokens=5))
    assert not BOUND.kept_by(RequestRecord(0.0, 0.0, 0.1, Ending.REFUSED))
    # One token has no further ones to be late.
    assert BOUND.kept_by(answered(0.0, 0.5, tokens=1))


def test_a_load_is_summarised() -> None:
    records = [
        answered(1.0, 1.5, 2.5, tokens=11),
        answered(2.0, 5.0, 6.0, tokens=21),
        RequestRecord(3.0, 3.25, 3.5, Ending.REFUSED),
        RequestRecord(4.0, 4.0, 11.0, Ending.FAILED, "UNAVAILABLE", deliveries=[5.0]),
    ]
    found = summarise_load(records, BOUND)
    assert {
        name: found[name] for name in ("requests", "answered", "refused", "failed", "errors", "tokens", "good")
    } == {
        "requests": 4,
        "answered": 2,
        "refused": 1,
        "failed": 1,
        "errors": {"UNAVAILABLE": 1},
        "tokens": 32,
        "good": 1,
    }
    assert found["seconds"] == 10.0
    assert (found["tokens_per_second"], found["requests_per_second"], found["goodput"]) == (3.2, 0.2, 0.1)
    assert found["first_token_seconds"] == pytest.approx({"p50": 1.75, "p90": 2.75, "p99": 2.975})
    assert found["seconds_per_token"]["p50"] == pytest.approx(0.075)
    assert found["client_late_seconds"] == 0.25


def test_a_load_of_nothing_has_no_figures() -> None:
    found = summarise_load([], BOUND)
    assert (found["requests"], found["tokens_per_second"], found["first_token_seconds"]) == (0, 0.0, None)


class Gate:
    """Holds answers back until all have been asked: an open loop must not wait for them."""

    def __init__(self, everyone: int) -> None:
        self._everyone = everyone
        self._all_there = asyncio.Event()
        self.asked: list[tuple[str | None, int]] = []

    async def ask(self, prompt: Prompt, seed: int, on_delivery: Callable[[], None]) -> int:
        self.asked.append((prompt.text, seed))
        if len(self.asked) == self._everyone:
            self._all_there.set()
        await self._all_there.wait()
        if seed % 4 == 2:
            raise RefusedError("full")
        if seed % 4 == 3:
            raise RequestFailedError("broken")
        on_delivery()
        on_delivery()
        return 2


def test_requests_do_not_wait_for_each_other() -> None:
    prompts = [Prompt(index, f"line {index}", f"text {index}", ()) for index in range(3)]
    gate = Gate(8)
    reporter = LineReporter(error_console())
    load = run_load(gate, prompts, [0.0] * 8, 0, "load", reporter)
    records = asyncio.run(asyncio.wait_for(load, LONG))
    assert gate.asked == [(f"text {index % 3}", index) for index in range(8)]
    endings = [record.ending for record in records]
    assert endings == [Ending.ANSWERED, Ending.ANSWERED, Ending.REFUSED, Ending.FAILED] * 2
    assert [record.tokens for record in records] == [2, 2, 0, 0] * 2
    assert records[3].error == "broken"
    assert all(len(record.deliveries) == 2 for record in records if record.ending is Ending.ANSWERED)
