"""Log probabilities of prompts: every token is asked for once, in order, whatever becomes of rows and KV meanwhile."""

from __future__ import annotations

from scheduler.messages import EmitTokens, FailSequence, Row, RowResult, RowStatus, TokenLogprobs
from scheduler.state.digests import DigestedTokens
from tests.unit.scheduler.driver import Driver, of_type

PROMPT = tuple((7 + place) % 50 for place in range(30))
"""What the driver submits as sequence 1."""


def driver_of(**request: object) -> Driver:
    driver = Driver(prefill_chunk=8, draft_length=0, steps_in_flight=1)
    driver.join("target")
    driver.submit(1, prompt_length=len(PROMPT), max_tokens=3, **request)
    return driver


def fed(row: Row, kv_len: int | None = None) -> RowResult:
    """The row was computed; `kv_len` where more than that was found in the worker's cache."""
    end = row.kv_len + len(row.tokens) if kv_len is None else kv_len
    tokens = () if row.scoring is None else row.scoring.tokens
    first = 0 if row.scoring is None else row.scoring.first
    scores = tuple(TokenLogprobs(token, -float(place)) for place, token in enumerate(tokens, first))
    output = (49,) if row.sample else ()
    digest = DigestedTokens([*PROMPT, *[49] * 3]).digest(end)
    return RowResult(1, RowStatus.OK, end, digest, tokens=output, prompt_logprobs=scores)


def only_row(driver: Driver) -> Row:
    (row,) = driver.only_step("target").rows
    return row


def places(row: Row) -> list[int]:
    """Positions of the tokens that the row asks for."""
    if row.scoring is None:
        return []
    last = row.scoring.first + len(row.scoring.tokens)
    assert row.scoring.tokens == PROMPT[row.scoring.first : last]
    return list(range(row.scoring.first, last))


def finish(driver: Driver) -> tuple[list[int], tuple[TokenLogprobs, ...]]:
    """The positions that are asked for until the first output, and what that says of the prompt."""
    asked: list[int] = []
    while not (emissions := of_type(driver.log, EmitTokens)):
        asked += places(only_row(driver))
        driver.answer("target", fed)
    driver.settle()
    assert not any(emission.prompt_logprobs for emission in of_type(driver.log, EmitTokens)[1:])
    return asked, emissions[0].prompt_logprobs


EVERY = tuple(TokenLogprobs(token, -float(place)) for place, token in enumerate(PROMPT) if place)


def test_every_token_but_the_first_is_asked_for_once() -> None:
    driver = driver_of(prompt_logprobs=3)
    scoring = only_row(driver).scoring
    assert scoring is not None
    assert (scoring.first, scoring.tokens, scoring.top) == (1, PROMPT[1:9], 3)
    assert finish(driver) == (list(range(1, 30)), EVERY)


def test_nothing_is_asked_for_unless_wanted_or_where_it_was_delivered_before() -> None:
    assert finish(driver_of()) == ([], ())
    assert finish(driver_of(prompt_logprobs=0, committed_output=(49,))) == ([], ())


def test_other_scores_than_those_asked_for_fail_the_sequence() -> None:
    for wrong in ((), EVERY[1:9], EVERY[:7]):
        driver = driver_of(prompt_logprobs=0)

        def answer(row: Row, wrong: tuple[TokenLogprobs, ...] = wrong) -> RowResult:
            result = fed(row)
            result.prompt_logprobs = wrong
            return result

        driver.answer("target", answer)
        (failure,) = of_type(driver.log, FailSequence)
        assert "8 log probabilities of prompt tokens were asked for, others came" in failure.error
