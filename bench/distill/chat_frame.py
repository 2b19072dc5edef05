"""What a chat template puts around the turns, as tokens. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Stand for messages; no template has them.
_USER, _ANSWER, _NEXT = "\u2460", "\u2461", "\u2462"


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """A chat template as tokens: what stands before the first user text and between turns, and what ends a turn.

    `forbidden` are the special tokens that nobody writes.
    """

    before: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_user: tuple[int, ...]
    stops: frozenset[int]
    forbidden: tuple[int, ...]


def read_chat_frame(tokenizer: Any, stops: Sequence[int]) -> ChatFrame:
    """From a transformers tokenizer. Raises `ValueError` for a template that cannot be taken apart into turns."""
    messages = [{"role": "user", "content": _USER}]
    opened = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    messages += [{"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    if opened.count(_USER) != 1 or whole.count(_ANSWER) != 1 or whole.count(_NEXT) != 1:
        raise ValueError("the chat template does not show each message once and as it is")
    before, to_answer = opened.split(_USER)
    to_user = whole.split(_ANSWER)[1].split(_NEXT)[0]
    begin, answer, user = (
        tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (before, to_answer, to_user)
    )
    if not begin:
        raise ValueError("the chat template puts nothing before the first message, must be at least one token")
    for part, name in ((answer, "user turns"), (user, "answers")):
        if not part or part[0] not in stops:
            raise ValueError(f"the chat template ends {name} with none of the stop tokens {sorted(stops)}")
    forbidden = tuple(sorted(special_token_ids(tokenizer) - set(stops)))
    return ChatFrame(begin, answer, user, frozenset(stops), forbidden)


def special_token_ids(tokenizer: Any) -> set[int]:
    """Of all special tokens, those without a role in the tokenizer's settings included."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)
