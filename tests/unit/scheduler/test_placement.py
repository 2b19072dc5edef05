"""On which workers sequences are placed, and what becomes of them when pages are short."""

from __future__ import annotations

from spool.scheduler.messages import FinishSequence, SendStep, SequenceRequest, SequenceSubmitted
from spool.scheduler.state.digests import DigestedTokens
from spool.scheduler.state.prefixes import KnownPrefixes
from tests.unit.scheduler.driver import Driver, check_to_the_end, of_type


def test_the_youngest_makes_room_and_comes_back_with_its_tokens() -> None:
    driver = Driver(draft_length=0)
    driver.join("target", pages=12, page_size=4)
    driver.submit(1, prompt_length=8, max_tokens=30)
    driver.submit(2, prompt_length=8, max_tokens=30)
    check_to_the_end(driver, 1, 2)
    assert driver.core.snapshot().preemptions > 0
    finished = [command.sequence_id for command in of_type(driver.log, FinishSequence)]
    assert finished == [1, 2]
    first_release = next(step for step in of_type(driver.log, SendStep) if step.released)
    assert first_release.released == (2,)


# --- where a common beginning is ---


def homes(driver: Driver) -> dict[str, list[int]]:
    """The sequences of each target."""
    placed = driver.core.sequences(1000)
    return {name: [one.sequence_id for one in placed if one.target_id == name] for name in driver.workers}


def serving(*targets: str, pages: int = 1000, **config: object) -> Driver:
    driver = Driver(draft_length=0, **config)
    for name in targets:
        driver.join(name, pages=pages)
    return driver


def ask(driver: Driver, sequence_id: int, *prompt: int, scope: bytes = b"") -> None:
    driver.handle(SequenceSubmitted(SequenceRequest(sequence_id, prompt, 5, cache_scope=scope)))


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


def test_where_a_prompt_of_another_scope_was_says_nothing() -> None:
    driver = serving("t", "u")
    ask(driver, 1, *range(100, 140))
    driver.settle()
    ask(driver, 2, 7, 8, 9)
    for sequence_id, scope in ((3, b"a"), (4, b"")):
        ask(driver, sequence_id, *range(100, 140), scope=scope)
    assert homes(driver) == {"t": [2, 4], "u": [3]}


def test_nobody_gets_more_than_a_quarter_beyond_the_average() -> None:
    driver = serving("t", "u", "v", "w", max_running=200)
    for sequence_id in range(1, 101):
        ask(driver, sequence_id, *range(100, 140), sequence_id)
        counts = [len(home) for home in homes(driver).values()]
        assert max(counts) <= max(1.25 * sequence_id / 4, min(counts) + 1)


def test_beginnings_that_came_long_ago_are_forgotten() -> None:
    known = KnownPrefixes(page_size=4, total_pages=6)
    old, new = DigestedTokens(range(18)), DigestedTokens(range(50, 68))
    known.add(b"", old)
    assert [known.longest(b"", one) for one in (old, new, DigestedTokens(range(9)))] == [16, 0, 8]
    # Four pages each; the longest are forgotten first.
    known.add(b"", new)
    assert [known.longest(b"", old), known.longest(b"", new)] == [8, 16]
    known.add(b"", DigestedTokens(range(80, 89)))
    assert [known.longest(b"", old), known.longest(b"", new)] == [0, 16]
    assert known.longest(b"", DigestedTokens([1, 2, 3])) == 0
