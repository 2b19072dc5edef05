"""Rounds that follow from matches are those of drafting step by step, with and without prompt lookup."""

import random
from collections.abc import Callable, Sequence

import pytest

from bench.distill.answers import Answer
from bench.distill.evaluation import ALL, score
from bench.distill.rounds import RoundCount

Propose = Callable[[list[int], int], list[int]]


def step_by_step(prompt: Sequence[int], answer: Sequence[int], draft_length: int, propose: Propose) -> RoundCount:
    """Speculative decoding as it is told: propose, compare one by one, commit, go on."""
    committed, rounds, tokens = [*prompt, answer[0]], 0, 0
    while len(committed) < len(prompt) + len(answer):
        rest = list(answer[len(committed) - len(prompt) :])
        proposal = propose(committed, draft_length)
        new: list[int] = []
        for guess in proposal:
            if len(new) == len(rest):
                break
            new.append(rest[len(new)])
            if guess != new[-1]:
                break
        else:
            new += rest[len(new) : len(new) + 1]
        committed += new
        rounds, tokens = rounds + 1, tokens + len(new)
    return RoundCount(rounds, tokens)


def look_up(history: list[int], count: int, match: int) -> list[int]:
    """By trying every ending and every place, the longest ending and the latest place first."""
    for length in range(min(32, len(history) - 1), match - 1, -1):
        ending = history[-length:]
        for end in range(len(history) - 1, length - 1, -1):
            if history[end - length : end] == ending:
                proposal = list(history)
                for _ in range(count):
                    proposal.append(proposal[end + len(proposal) - len(history)])
                return proposal[len(history) :]
    return []


@pytest.mark.parametrize("draft_length", [1, 3, 4])
@pytest.mark.parametrize("match", [1, 2])
def test_rounds_are_those_of_drafting_step_by_step(draft_length: int, match: int) -> None:
    choices = random.Random(draft_length * 10 + match)
    wanted = {"draft": RoundCount(), "lookup": RoundCount(), "combined": RoundCount()}
    cases = []
    for index in range(12):
        prompt = tuple(choices.randrange(5) for _ in range(choices.randint(1, 15)))
        answer = tuple(choices.randrange(5) for _ in range(choices.randint(1, 40)))
        rule = {place: choices.randrange(5) for place in range(100)}
        text = [*prompt, *answer]
        # A draft that is a function of what stands before: here of its length, and right two times out of three.
        for place in range(len(text)):
            if choices.random() < 0.67:
                rule[place] = text[place]

        def model(history: list[int], count: int, rule: dict[int, int] = rule) -> list[int]:
            return [rule[len(history) + ahead] for ahead in range(count)]

        def lookup(history: list[int], count: int) -> list[int]:
            return look_up(history, count, match)

        def both(history: list[int], count: int, model: Propose = model, lookup: Propose = lookup) -> list[int]:
            return lookup(history, count) or model(history, count)

        cases.append(
            (Answer(f"c{index % 2}", prompt, answer), [rule[len(prompt) + i] == t for i, t in enumerate(answer)])
        )
        for name, propose in (("draft", model), ("lookup", lookup), ("combined", both)):
            wanted[name].add(step_by_step(prompt, answer, draft_length, propose))
    found = score(cases, draft_length, match)
    assert list(found) == ["c0", "c1", ALL]
    assert {name: getattr(found[ALL], name) for name in wanted} == wanted
    assert found[ALL].answers == 12
    assert found[ALL].agreement == sum(map(sum, (m for _, m in cases))) / sum(len(m) for _, m in cases)
    assert found["c0"].draft.rounds + found["c1"].draft.rounds == found[ALL].draft.rounds


def test_without_lookup_there_are_no_figures_for_it() -> None:
    summary = score([(Answer("a", (1,), (2, 3, 4)), [True, True, False])], 4, None)[ALL].summary()
    assert summary == {"answers": 1, "positions": 3, "agreement": 0.6667, "draft_tokens_per_round": 2.0}
