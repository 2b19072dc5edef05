"""Keeps the texts of special tokens that messages contain from becoming those tokens."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers.models import BPE

from spool.services.text.added_tokens import changed, with_added_tokens

# Digits pass through all filters of templates unchanged; nobody can guess these.
_MARK, _NAME = (f"{secrets.randbelow(10**24):024}" for _ in range(2))
_WINDOW = 1 << 14
_SAME_IDS: Mapping[int, int] = {}


class PlainSpecials:
    """Texts are marked before a template is rendered, so that its own special tokens can be told from theirs."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, special_texts: frozenset[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = sorted((text for text in special_texts if len(text) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        self._longest = max(map(len, self._texts), default=0)
        # Two texts side by side, or one beside the template's, could make up a special token as well.
        cuts = [(text[:cut], text[cut:]) for text in self._texts for cut in range(1, len(text))]
        self._heads = tuple({head for head, _ in cuts})
        self._tails = tuple({tail for _, tail in cuts})

    def marked(self, value: Any) -> Any:
        """The value with a mark within each special token's text, and at ends that could be a part of one."""
        if isinstance(value, str):
            return type(value)(self._marked_text(value))
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(inner) for key, inner in value.items()}
        return [self.marked(inner) for inner in value] if isinstance(value, list | tuple) else value

    def unmarked(self, text: str) -> str:
        return text.replace(_MARK, "")

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered text with marks."""
        plain = self.unmarked(text)
        tokenizer, ids = self._tokenizer, _SAME_IDS
        if sum(1 for _ in self._found(text)) != sum(1 for _ in self._found(plain)):
            (tokenizer, ids), plain = self._renaming, self.unmarked(self._replaced(text, _other_name))
        # The method for several texts frees the interpreter's lock.
        [encoding] = tokenizer.encode_batch_fast([plain], add_special_tokens=False)
        return [ids.get(token, token) for token in encoding.ids]

    def _found(self, text: str) -> Iterator[re.Match[str]]:
        """As `finditer`, but no search holds the interpreter's lock for longer than `_WINDOW` characters take."""
        place = 0
        while place < len(text):
            end = place + _WINDOW
            found = self._special.search(text, place, end + self._longest)
            if found is not None and found.start() < end:
                yield found
                end = found.end()
            place = end

    def _replaced(self, text: str, new: Callable[[str], str]) -> str:
        parts, place = [], 0
        for found in self._found(text):
            parts += [text[place : found.start()], new(found[0])]
            place = found.end()
        return "".join((*parts, text[place:]))

    def _marked_text(self, text: str) -> str:
        while any(self._found(text)):
            text = self._replaced(text, lambda special: f"{special[0]}{_MARK}{special[1:]}")
        bare = text.strip()
        if bare.startswith(self._tails):
            text = text.replace(bare, _MARK + bare)
        if bare.endswith(self._heads):
            text = text.replace(bare, bare + _MARK)
        return text

    @cached_property
    def _renaming(self) -> tuple[tokenizers.Tokenizer, Mapping[int, int]]:
        """The tokenizer with other names of the special tokens, which no text contains, and their ids by those that it
        gives."""
        model = self._tokenizer.model
        if isinstance(model, BPE) and not any(len(model.tokenize(text)) == 1 for text in self._texts):
            # No pairs of tokens merge to a special one.
            return with_added_tokens(
                self._tokenizer,
                lambda token: changed(
                    token, _other_name(token.content) if token.content in self._texts else token.content, token.special
                ),
            )
        # Takes a second for a large vocabulary.
        description = json.loads(self._tokenizer.to_str())
        for token in description["added_tokens"]:
            if token["content"] in self._texts:
                token["content"] = _other_name(token["content"])
        names = {text: _other_name(text) for text in self._texts}
        form = description["model"]
        if isinstance(form["vocab"], dict):
            form["vocab"] = {names.get(text, text): number for text, number in form["vocab"].items()}
        else:
            form["vocab"] = [[names.get(text, text), score] for text, score in form["vocab"]]
        if form.get("unk_token") in names:
            form["unk_token"] = names[form["unk_token"]]
        return tokenizers.Tokenizer.from_str(json.dumps(description)), _SAME_IDS


def _other_name(special: str) -> str:
    return f"\ue000{_NAME}{special.encode().hex()}\ue001"
