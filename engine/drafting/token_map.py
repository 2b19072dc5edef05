"""A draft whose vocabulary is not its target's: the draft's id for each of the target's. Knows no torch.

Outside the draft's engine, tokens have the target's ids only.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from spool.engine.errors import TokenizerError
from spool.engine.models.vocabulary import (
    Vocabulary,
    named_tokens,
    no_tokenizer,
    read_json,
    read_tokenizer,
    tokenizer_settings,
    vocabulary_of,
)

_STAND_INS = ("unk_token", "pad_token", "bos_token", "eos_token")


@dataclass(frozen=True, slots=True)
class TokenMap:
    """`tokenizer` and `vocabulary` are the target's. `fed` has a token of the draft for each of its ids: the same one,
    or where the draft has no such token, its unknown, padding, beginning or end token. `known` are the target's ids,
    ascending, of the tokens that both have; the draft proposes no others."""

    tokenizer: Tokenizer
    vocabulary: Vocabulary
    fed: list[int]
    known: list[int]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Of the model in a folder: its tokens' texts by id, without those that its embedding has no row for."""

    folder: Path
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    texts: dict[int, str]

    @classmethod
    def of(cls, folder: Path) -> _Tokens:
        tokenizer = read_tokenizer(folder)
        if tokenizer is None:
            raise TokenizerError(no_tokenizer(folder))
        config = read_json(folder / "config.json")
        rows = config.get("text_config", config).get("vocab_size", sys.maxsize)
        vocabulary = vocabulary_of(tokenizer, folder, rows)
        table = tokenizer.get_vocab(with_added_tokens=True)
        texts = {number: text for text, number in table.items() if number < vocabulary.size}
        return cls(folder, tokenizer, vocabulary, dict(sorted(texts.items())))

    def decoded(self, ids: list[int]) -> list[str]:
        """Each token twice: what stands for a space is left out where a text begins."""
        decoded: list[str] = self.tokenizer.decode_batch([[one, one] for one in ids], skip_special_tokens=False)
        return decoded


def map_tokens(target: Path, draft: Path) -> TokenMap | None:
    """How the model in the folder `draft` takes the token ids of the one in `target`; None where they are its own.

    A token is the same in both if it has the same text, in the table of ids and decoded. Raises TokenizerError, also
    where the smaller vocabulary has not even half of its tokens in common with the other.
    """
    theirs, own = _Tokens.of(target), _Tokens.of(draft)
    if theirs.vocabulary == own.vocabulary:
        return None
    ids = {text: number for number, text in own.texts.items()}
    pairs = [(number, ids[text]) for number, text in theirs.texts.items() if text in ids]
    decoded = theirs.decoded([one for one, _ in pairs]), own.decoded([other for _, other in pairs])
    same = dict(pair for pair, one, other in zip(pairs, *decoded, strict=True) if one == other)
    smaller = min(len(theirs.texts), len(own.texts))
    if 2 * len(same) < smaller:
        first = next(number for number in theirs.texts if number not in same)
        raise TokenizerError(
            f"{len(same)} tokens are the same in {target.name} and {draft.name}, must be at least {-(-smaller // 2)}, "
            f"half of the smaller vocabulary: the first that differs is {first} of {target.name}, "
            f"{theirs.texts[first]!r}"
        )
    named = named_tokens(tokenizer_settings(draft))
    stand_ins = [ids[text] for name in _STAND_INS if (text := named.get(name)) in ids]
    stand_in = stand_ins[0] if stand_ins else 0
    fed = [same.get(number, stand_in) for number in range(theirs.vocabulary.size)]
    return TokenMap(theirs.tokenizer, theirs.vocabulary, fed, list(same))
