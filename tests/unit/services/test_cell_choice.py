"""Which cell a prompt goes to: the one that has its beginning, within the bound on each cell's part."""

from __future__ import annotations

import math
import random

import pytest

from spool.services.scheduler_client.cell_choice import PAGE_TOKENS, CellChoice, CellState

BOUND = 1.25


def cells_of(sequences: dict[int, int], targets: dict[int, int] | None = None) -> list[CellState]:
    return [CellState(number, (targets or {}).get(number, 2), count) for number, count in sequences.items()]


def idle(count: int) -> list[CellState]:
    return cells_of(dict.fromkeys(range(1, count + 1), 0))


def prompt_of(pages: int, name: int) -> tuple[int, ...]:
    return tuple(random.Random(name).randrange(30_000) for _ in range(pages * PAGE_TOKENS))


def test_a_prompt_goes_where_the_longest_beginning_of_it_is() -> None:
    choice = CellChoice()
    shared, tenant = prompt_of(2, 1), prompt_of(2, 2)
    first = choice.choose(b"", shared, idle(4))
    elsewhere = [cell for cell in idle(4) if cell.number != first]
    second = choice.choose(b"", shared + tenant, elsewhere)
    # Both know the first two pages, one knows what follows.
    assert choice.choose(b"", shared + tenant + (7,) * 500, idle(4)) == second
    busy = [CellState(cell.number, 2, 40 if cell.number == first else 38) for cell in idle(4)]
    assert choice.choose(b"", shared + prompt_of(1, 3), busy) == second, (
        "of two that have as much, the one with less work"
    )


def test_prompts_of_other_scopes_do_not_draw_a_prompt() -> None:
    """Where a cell is taken that had the prompt in this scope, whatever is known of it in others."""
    choice, prompt = CellChoice(), prompt_of(3, 1)
    scopes = [b"", *(bytes([number]) * 32 for number in range(30))]
    homes = [choice.choose(scope, prompt, idle(4)) for scope in scopes]
    assert set(homes) == {1, 2, 3, 4}
    assert [choice.choose(scope, prompt, idle(4)) for scope in scopes] == homes


@pytest.mark.parametrize(("count", "prompts"), [(1, 5), (2, 1), (3, 5), (3, 1000), (16, 1), (16, 1000)])
def test_no_cell_gets_more_than_its_part(count: int, prompts: int) -> None:
    """Whatever the prompts are, and wherever the sequences end."""
    rng = random.Random(count * prompts)
    choice = CellChoice()
    targets = {number: rng.randrange(1, 5) for number in range(1, count + 1)}
    sequences = dict.fromkeys(targets, 0)
    for _ in range(400):
        chosen = choice.choose(b"", prompt_of(2, rng.randrange(prompts)), cells_of(sequences, targets))
        part = (sum(sequences.values()) + 1) * targets[chosen] / sum(targets.values())
        assert sequences[chosen] + 1 <= math.ceil(BOUND * part)
        sequences[chosen] += 1
        while sum(sequences.values()) > 100:
            ended = rng.choice([number for number, live in sequences.items() if live])
            sequences[ended] -= 1


def test_what_a_lost_cell_had_is_forgotten() -> None:
    choice = CellChoice()
    prompts = [prompt_of(2, name) for name in range(30)]
    before = [choice.choose(b"", prompt, idle(2)) for prompt in prompts]
    assert set(before) == {1, 2}
    choice.forget(1)
    others = [
        choice.choose(b"", prompt, [CellState(1, 2, 0), CellState(2, 2, 0), CellState(3, 2, 0)]) for prompt in prompts
    ]
    kept = [now == 2 for now, first in zip(others, before, strict=True) if first == 2]
    moved = [now for now, first in zip(others, before, strict=True) if first == 1]
    assert all(kept)
    assert set(moved) != {1}
