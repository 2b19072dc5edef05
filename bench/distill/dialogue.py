"""A row of self-dialogue: whose turn it is, how that turn is sampled, which tokens are forced. Knows no torch."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from bench.distill.chat_frame import ChatFrame


class TokenKind(IntEnum):
    """How a token came to be. Forced ones are the template's, an opener's, or the end of a turn cut short."""

    FORCED = 0
    USER = 1
    GREEDY = 2
    SAMPLED = 3


@dataclass(frozen=True, slots=True)
class DialogueStyle:
    """Shares of turns, temperatures to draw from, and limits of turns as parts of the row's length."""

    begun: float = 0.6
    """User turns that begin with an opener; the others the target begins itself."""
    greedy: float = 0.65
    """Answers decoded greedily; the others are sampled."""
    user_temperatures: tuple[float, ...] = (0.7, 0.9, 1.0)
    answer_temperatures: tuple[float, ...] = (0.6, 0.8, 1.0)
    first_user_limits: tuple[float, ...] = (0.12, 0.2, 0.3, 0.5)
    later_user_limits: tuple[float, ...] = (0.08, 0.16, 0.24)
    answer_limit: float = 0.6


class DialogueRow:
    """One row; `next` is called once per position and says which token stands there.

    `openers` are tokens, by task: tasks are drawn with equal chances, then an opener of the task.
    """

    def __init__(
        self,
        frame: ChatFrame,
        openers: Sequence[Sequence[Sequence[int]]],
        style: DialogueStyle,
        length: int,
        choices: random.Random,
    ) -> None:
        self._frame = frame
        self._openers = openers
        self._style = style
        self._length = length
        self._choices = choices
        self._forced = deque(frame.before)
        self._begin_user_turn(style.first_user_limits)

    @property
    def temperature(self) -> float:
        """For the next token; 0 is greedy."""
        return self._temperature

    def next(self, chosen: int) -> tuple[int, TokenKind]:
        """The token at the next position, where the model has `chosen` one."""
        if self._forced:
            return self._forced.popleft(), TokenKind.FORCED
        kind = self._kind
        self._written += 1
        if chosen not in self._frame.stops and self._written <= self._limit:
            return chosen, kind
        if kind is TokenKind.USER:
            self._begin_answer()
        else:
            self._forced.extend(self._frame.to_user)
            self._begin_user_turn(self._style.later_user_limits)
        token = self._forced.popleft()
        return token, kind if token == chosen else TokenKind.FORCED

    def _begin_user_turn(self, limits: Sequence[float]) -> None:
        if self._choices.random() < self._style.begun:
            self._forced.extend(self._choices.choice(self._choices.choice(self._openers)))
        temperature = self._choices.choice(self._style.user_temperatures)
        self._begin(TokenKind.USER, temperature, self._choices.choice(limits))

    def _begin_answer(self) -> None:
        self._forced.extend(self._frame.to_answer)
        if self._choices.random() < self._style.greedy:
            self._begin(TokenKind.GREEDY, 0.0, self._style.answer_limit)
        else:
            temperature = self._choices.choice(self._style.answer_temperatures)
            self._begin(TokenKind.SAMPLED, temperature, self._style.answer_limit)

    def _begin(self, kind: TokenKind, temperature: float, limit: float) -> None:
        self._kind = kind
        self._temperature = temperature
        self._written = 0
        self._limit = max(1, int(limit * self._length))
