"""Tokenizers that differ from another one in their added tokens alone, and share its model, which is large."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tokenizers
from tokenizers import AddedToken


def with_added_tokens(
    tokenizer: tokenizers.Tokenizer, change: Callable[[AddedToken], AddedToken]
) -> tuple[tokenizers.Tokenizer, Mapping[int, int]]:
    """The tokenizer with other added tokens, in a millisecond, and for each id that it gives one of these the id that
    the tokenizer has. It encodes without tokens around the text."""
    shared = tokenizers.Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        shared.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        shared.pre_tokenizer = tokenizer.pre_tokenizer
    if tokenizer.decoder is not None:
        shared.decoder = tokenizer.decoder
    ids = {number: change(token) for number, token in sorted(tokenizer.get_added_tokens_decoder().items())}
    shared.add_tokens(list(ids.values()))
    given = ((shared.token_to_id(token.content), number) for number, token in ids.items())
    return shared, {other: number for other, number in given if other is not None}


def changed(token: AddedToken, content: str, special: bool) -> AddedToken:
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=special,
    )
