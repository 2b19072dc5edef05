"""A schedule that fails becomes a short one that fails in the same way, and says what happens in it."""

from __future__ import annotations

import random
import re

import pytest

from tests.sim.cell.plan import make_plan
from tests.sim.cell.shrinking import fewest, kind_of, shrink, size_of
from tests.sim.test_planted_bugs import failure_of, lost_workers_blame_nobody

POISON = ("poison",)


def test_only_what_fails_together_is_left() -> None:
    tried: list[int] = []

    def fails(parts: object) -> bool:
        tried.append(len(list(parts)))  # type: ignore[call-overload]
        return {3, 17, 90} <= set(parts)  # type: ignore[call-overload]

    assert list(fewest(range(200), fails)) == [3, 17, 90]
    assert len(tried) < 100


def test_what_fails_for_itself_needs_nothing() -> None:
    assert list(fewest(range(200), lambda _: True)) == []


def test_failures_of_one_kind_differ_in_numbers_only() -> None:
    one = kind_of("request 17 got [5, 6], must get [5, 7]")
    assert one == kind_of("request 3 got [1], must get [2, 2, 2]")
    assert one != kind_of("request 17 was cancelled by nobody")


def test_a_schedule_that_breaks_no_rule_cannot_be_shrunk() -> None:
    assert shrink(3, 20) is None


def test_a_planted_bug_is_told_in_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lost_workers_blame_nobody(monkeypatch)
    seed = next(seed for seed in range(80) if failure_of(seed, POISON) is not None)
    shrunk = shrink(seed, kinds=POISON)
    assert shrunk is not None
    whole = make_plan(random.Random(seed), seed, 200, POISON)
    assert 4 * shrunk.size <= size_of(whole)
    failure = re.search(f"seed {seed} with 200 sequences: (.*)", failure_of(seed, POISON) or "")
    assert failure is not None
    assert kind_of(shrunk.failure) == kind_of(failure[1])
    lines = shrunk.transcript.splitlines()
    assert re.search(r"FAULT +poison", shrunk.transcript)
    victim = re.search(r"has killed \d+ (\w+) workers", shrunk.failure)
    assert victim is not None
    deaths = [line for line in lines if re.search(rf" {victim[1]}\d +dies", line)]
    assert len(deaths) >= 2
    assert any("what it computed may be to blame" in line for line in lines)
    assert re.search(r"RULE BROKEN +.* has killed", lines[-1])
    assert len(lines) < 200
