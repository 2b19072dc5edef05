"""Sampling parameters of a request: opaque to the scheduler core, applied by the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NoReturn

MAX_SEED = 2**64 - 1
MAX_TOKEN_ID = 2**31 - 1
"""Of any vocabulary; what the protocol has room for."""
MAX_GRAMMAR_BYTES = 64 * 1024
"""Of a grammar's definition, in UTF-8."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must look like, in the form that engine/sampling/grammars.py compiles, and the tokens that end it:
    these come where the grammar is complete, and nowhere else. Raises `ValueError` naming field, value and limit.
    """

    definition: str
    end_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        if not 1 <= len(self.definition) <= MAX_GRAMMAR_BYTES:
            raise ValueError(
                f"grammar has {len(self.definition)} characters, must have between 1 and {MAX_GRAMMAR_BYTES}"
            )
        if not self.end_token_ids or not all(0 <= token_id <= MAX_TOKEN_ID for token_id in self.end_token_ids):
            raise ValueError(
                f"end_token_ids of the grammar is {set(self.end_token_ids)}, must be token ids between 0 and "
                f"{MAX_TOKEN_ID}, one at least"
            )


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How the next token is sampled from the target's logits.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and the penalties 1, 0, 0 leave the logits as they are.
    `repetition_penalty` looks at prompt and output, the other two penalties at the output only. None of the
    `end_token_ids` is sampled among the first `min_tokens` tokens of output. `seed` is any unsigned 64-bit number;
    equal seeds give equal text, whatever the batch, the draft or the workers. With a `grammar`, only tokens that it
    allows are sampled; where it is complete, `min_tokens` does not put the end off. The last token of a bad word, each
    a sequence of tokens, is not sampled where the output ends with the others, unless nothing else is left.

    Raises `ValueError` naming field, value and limit.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0
    min_tokens: int = 0
    end_token_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def given(cls, *, top_p: float = 1.0, **values: Any) -> SamplingParameters:
        """From the values that a client gives: a `top_p` of 0 means greedy, as in other servers."""
        sampling = cls(top_p=1.0 if top_p == 0 else top_p, **values)
        return replace(sampling, temperature=0.0) if top_p == 0 else sampling

    def __post_init__(self) -> None:
        # Each check builds its message only when it fails: every request passes here several times.
        if not 0 <= self.temperature <= 100:
            self._refuse("temperature", "between 0 and 100")
        if not 0 <= self.top_k <= MAX_TOKEN_ID:
            self._refuse("top_k", f"0 (off) or more, and at most {MAX_TOKEN_ID}")
        if not 0 < self.top_p <= 1:
            self._refuse("top_p", "above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            self._refuse("min_p", "between 0 and 1")
        # Scores divided by less might be infinite.
        if not 0.01 <= self.repetition_penalty <= 100:
            self._refuse("repetition_penalty", "between 0.01 and 100")
        if not -2 <= self.presence_penalty <= 2:
            self._refuse("presence_penalty", "between -2 and 2")
        if not -2 <= self.frequency_penalty <= 2:
            self._refuse("frequency_penalty", "between -2 and 2")
        if not 0 <= self.seed <= MAX_SEED:
            self._refuse("seed", f"between 0 and {MAX_SEED}")
        if not 0 <= self.min_tokens <= MAX_TOKEN_ID:
            self._refuse("min_tokens", f"between 0 and {MAX_TOKEN_ID}")
        for token_id in self.end_token_ids:
            if not 0 <= token_id <= MAX_TOKEN_ID:
                raise ValueError(f"end_token_ids holds {token_id}, must be token ids between 0 and {MAX_TOKEN_ID}")
        for word in self.bad_words:
            if not word or not all(0 <= token_id <= MAX_TOKEN_ID for token_id in word):
                raise ValueError(
                    f"bad_words holds {word}, must be token ids between 0 and {MAX_TOKEN_ID}, one at least"
                )
        for token_id, bias in self.logit_bias.items():
            if not 0 <= token_id <= MAX_TOKEN_ID or not -100 <= bias <= 100:
                raise ValueError(
                    f"logit_bias[{token_id}] is {bias!r}, must be a token id with a value between -100 and 100"
                )

    def _refuse(self, name: str, limit: str) -> NoReturn:
        raise ValueError(f"{name} is {getattr(self, name)!r}, must be {limit}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def may_end(self, output_tokens: int) -> bool:
        """Whether any token may follow an output of so many tokens, those that end the output among them."""
        return output_tokens >= self.min_tokens or not self.end_token_ids

    @property
    def uses_history(self) -> bool:
        """Whether the next token depends on the tokens before it in another way than through the logits."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties or bool(self.bad_words)
