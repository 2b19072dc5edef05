"""Grammars over the simulated model's vocabulary: small automata, and what may come next in them.

A definition is a JSON list of states, each a pair: whether the output may end there, and the tokens that may come. The
product's own GrammarState follows outputs with an `AutomatonMatcher` in the place of the library's matcher. The oracle
knows the output and asks `allowed`, which walks from the first state each time and keeps nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from functools import lru_cache

from spool.scheduler.sampling import Grammar

END = 63
"""The token that ends an output of a grammar; no state has it among its tokens."""

_MOST_STATES = 6
_MOST_TOKENS = 16

State = tuple[bool, list[int]]


def draw_grammar(rng: random.Random) -> Grammar:
    """A third of the states leave one token only, and the last nothing but the end."""
    states: list[State] = []
    for _ in range(rng.randint(2, _MOST_STATES)):
        forced = rng.random() < 1 / 3
        tokens = sorted(rng.sample(range(END), 1 if forced else rng.randint(2, _MOST_TOKENS)))
        states.append((not forced and rng.random() < 0.3, tokens))
    states.append((True, []))
    return Grammar(json.dumps(states), frozenset([END]))


@lru_cache(maxsize=1024)
def _states(definition: str) -> list[State]:
    states: list[State] = json.loads(definition)
    return states


def allowed(definition: str, end_token_ids: frozenset[int], output: Iterable[int]) -> list[int]:
    """What may come after the output. Raises ValueError where the output itself does not fit."""
    states = _states(definition)
    place = 0
    for token in output:
        if token not in states[place][1]:
            raise ValueError(f"{token} may not come in state {place} of {definition}")
        place = (3 * place + token + 1) % len(states)
    may_end, tokens = states[place]
    return sorted({*tokens, *end_token_ids}) if may_end else tokens


class AutomatonMatcher:
    """What GrammarState needs of a matcher, and the choices that it leaves."""

    def __init__(self, definition: str, tokens: Iterable[int] = ()) -> None:
        self._definition = definition
        self._tokens = list(tokens)

    def try_consume_tokens(self, tokens: Sequence[int]) -> int:
        """Takes the tokens up to the first that may not come. Returns how many it took."""
        for count, token in enumerate(tokens):
            if token not in allowed(self._definition, frozenset(), self._tokens):
                return count
            self._tokens.append(token)
        return len(tokens)

    def rollback(self, count: int) -> bool:
        del self._tokens[len(self._tokens) - count :]
        return True

    def is_error(self) -> bool:
        return False

    def copy(self) -> AutomatonMatcher:
        return AutomatonMatcher(self._definition, self._tokens)

    def choices(self, end_token_ids: frozenset[int]) -> list[int]:
        return allowed(self._definition, end_token_ids, self._tokens)
