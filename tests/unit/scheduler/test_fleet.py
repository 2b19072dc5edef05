"""Which worker takes a sequence in, and what the core does when workers and sequences come close together."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

from scheduler.config import SchedulerConfig
from scheduler.messages import FailSequence, RefuseSequence, Role, SequenceRequest, SequenceSubmitted, WorkerSpec
from scheduler.state.digests import DigestedTokens
from scheduler.state.fleet import Fleet
from scheduler.state.prefixes import KnownPrefixes
from tests.unit.scheduler.driver import Driver, of_type


def fleet(*workers: tuple[str, Role]) -> Fleet:
    found = Fleet(SchedulerConfig())
    for name, role in workers:
        found.add(WorkerSpec(name, role, 4, 10, 100, 64))
    return found


TARGET, DRAFT = Role.TARGET, Role.DRAFT
TOKENS = DigestedTokens(range(4))


def test_the_target_with_the_fewest_sequences_that_has_room() -> None:
    found = fleet(("t", TARGET), ("u", TARGET))
    first, second = found.targets.values()
    assert found.largest_capacity == first.capacity > 0
    assert fleet().largest_capacity == 0
    assert found.pick_target(TOKENS, 40, None) is first
    assert found.pick_target(TOKENS, 41, None) is None
    first.sequences[1] = first.sequences[2] = second.sequences[3] = None  # type: ignore[assignment]
    # Each now keeps a page back, for its own sequences to grow into.
    assert found.pick_target(TOKENS, 37, None) is None
    assert found.pick_target(TOKENS, 36, None) is second
    assert found.pick_target(TOKENS, 36, 2) is second
    assert found.pick_target(TOKENS, 36, 1) is None
    found.drain(second)
    assert found.pick_target(TOKENS, 36, None) is first
    assert found.pick_target(TOKENS, 36, 2) is None
    assert found.pick_target(TOKENS, 36, 3) is first
    assert first.pages.reserve(1, 1)
    assert found.pick_target(TOKENS, 36, None) is None
    assert found.pick_target(TOKENS, 32, None) is first


def test_the_draft_with_the_fewest_sequences_that_has_room() -> None:
    found = fleet(("d", DRAFT), ("e", DRAFT))
    first, second = found.drafts.values()
    assert found.pick_draft(TOKENS, 1) is first
    first.sequences[1] = None  # type: ignore[assignment]
    assert found.pick_draft(TOKENS, 1) is second
    assert second.pages.reserve(9, 40)
    assert found.pick_draft(TOKENS, 1) is first


# --- where a common beginning is ---


def homes(driver: Driver) -> dict[str, list[int]]:
    """The sequences of each target."""
    return {name: list(target.sequences) for name, target in driver.core._fleet.targets.items()}


def serving(*targets: str, pages: int = 1000, **config: object) -> Driver:
    driver = Driver(draft_length=0, **config)
    for name in targets:
        driver.join(name, pages=pages)
    return driver


def ask(driver: Driver, sequence_id: int, *prompt: int) -> None:
    driver.handle(SequenceSubmitted(SequenceRequest(sequence_id, prompt, 5)))


def test_a_prompt_goes_where_its_beginning_was() -> None:
    driver = serving("t", "u")
    first, second = range(100, 140), range(200, 240)
    ask(driver, 1, *first, 1)
    ask(driver, 2, *second, 2)
    driver.settle()
    # By count alone, each would go to the other one.
    ask(driver, 3, *second, 3)
    ask(driver, 4, *first, 4)
    assert homes(driver) == {"t": [4], "u": [3]}


def test_the_longer_common_beginning_counts() -> None:
    driver = serving("t", "u")
    ask(driver, 1, *range(100, 120), *range(20))
    ask(driver, 2, *range(100, 140))
    driver.settle()
    ask(driver, 3, *range(100, 140), 7)
    assert homes(driver) == {"t": [], "u": [3]}


def test_an_idle_target_comes_before_any_beginning() -> None:
    driver = serving("t", "u")
    ask(driver, 1, *range(100, 140), 1)
    ask(driver, 2, *range(100, 140), 2)
    assert homes(driver) == {"t": [1], "u": [2]}


def test_nobody_gets_more_than_a_quarter_beyond_the_average() -> None:
    driver = serving("t", "u", "v", "w", max_running=200)
    for sequence_id in range(1, 101):
        ask(driver, sequence_id, *range(100, 140), sequence_id)
        counts = [len(home) for home in homes(driver).values()]
        assert max(counts) <= max(1.25 * sequence_id / 4, min(counts) + 1)


def test_groups_with_a_system_prompt_each_stay_together() -> None:
    """Sixteen system prompts in any order, four targets whose pages hold eight each. By count alone half would find
    theirs, and at best all but each group's first."""
    rng = random.Random(1)
    driver = serving("t", "u", "v", "w", pages=144, max_running=32)
    caches: dict[str, list[int]] = defaultdict(list)
    found = 0
    for sequence_id in range(1, 801):
        group = rng.randrange(16)
        ask(driver, sequence_id, *range(1000 * group, 1000 * group + 64), sequence_id)
        (name,) = [name for name, home in homes(driver).items() if sequence_id in home]
        found += group in caches[name]
        caches[name] = [group, *(one for one in caches[name] if one != group)][:8]
        counts = [len(home) for home in homes(driver).values()]
        while sum(counts) > 20:
            driver.answer(rng.choice([name for name, home in homes(driver).items() if home]))
            counts = [len(home) for home in homes(driver).values()]
    assert found >= 0.8 * (800 - 16)


def test_beginnings_that_came_long_ago_are_forgotten() -> None:
    known = KnownPrefixes(page_size=4, total_pages=6)
    old, new = DigestedTokens(range(18)), DigestedTokens(range(50, 68))
    known.add(old)
    assert [known.longest(old), known.longest(new), known.longest(DigestedTokens(range(9)))] == [16, 0, 8]
    # Four pages each; the longest are forgotten first.
    known.add(new)
    assert [known.longest(old), known.longest(new)] == [8, 16]
    known.add(DigestedTokens(range(80, 89)))
    assert [known.longest(old), known.longest(new)] == [0, 16]
    assert known.longest(DigestedTokens([1, 2, 3])) == 0


def test_who_waits_for_a_first_target_that_is_too_small_is_told() -> None:
    driver = Driver(draft_length=0)
    driver.submit(1, prompt_length=60)
    driver.submit(2, prompt_length=3)
    assert [end.sequence_id for end in of_type(driver.join("small", max_length=50), FailSequence)] == [1]


def test_those_who_come_before_the_next_plan_need_not_queue() -> None:
    driver = Driver(max_running=2, max_queued_sequences=1, draft_length=0)
    driver.join("target")
    request = SequenceRequest(1, (1, 2, 3), 5)
    refused = [
        command.sequence_id
        for sequence_id in (1, 2, 3, 4, 5)
        for command in driver.core.apply(SequenceSubmitted(replace(request, sequence_id=sequence_id)), 0.0)
        if isinstance(command, RefuseSequence)
    ]
    assert refused == [4, 5]
