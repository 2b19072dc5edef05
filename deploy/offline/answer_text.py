"""Whether the text of an answer is that of the tokens in its receipt."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from services.gateway.token_strings import TokenStrings
from services.receipts.receipt import FoundReceipt, Receipt
from services.text.incremental_decoder import whole_text
from services.text.tokenizer import ModelTokenizer

_SHOWN = 24
"""Characters of either text from the first difference on."""


def text_difference(found: FoundReceipt, receipt: Receipt, tokenizer: ModelTokenizer) -> str | None:
    """The first place where a choice says something else than the receipt's tokens; None if there is none.

    Of an event of a stream, and of a message with more than content, each text must be a part of what the tokens say.
    Calls of functions are not compared.
    """
    choice = found.choice
    if found.whole and choice.get("token_ids") not in (None, list(receipt.output)):
        return "token_ids are not the output_token_ids of the receipt"
    calls = (choice.get("message") or {}).get("tool_calls")
    plain = found.whole and not calls and found.texts.keys() in ({"text"}, {"message.content"})
    sayings = _sayings(receipt, tokenizer)
    for name, text in found.texts.items():
        fits = any(_is_all(text, choice, *saying) if plain else text in saying[0] for saying in sayings)
        if not fits:
            place, rest = max((_found_until(text, said, plain) for said, _ in sayings), key=lambda each: each[0])
            return f"{name} goes on with {_shown(text[place:])} at character {place}, the tokens with {_shown(rest)}"
    return None


def _sayings(receipt: Receipt, tokenizer: ModelTokenizer) -> list[tuple[str, str]]:
    """What the tokens may have been answered as: with special tokens and without, after the prompt's text and without.
    Each as a whole, and without the last token, which may have ended it."""

    prompt, output, strings, sayings = receipt.prompt, receipt.output, TokenStrings(tokenizer), []
    for skips in (True, False):
        begun = strings.begun_character(prompt, skips)
        both = []
        for tokens in (output, output[:-1]):
            decoder = tokenizer.decoder(prompt, skips, begun=begun)
            both.append(decoder.push(tokens) + decoder.finish())
        echo = whole_text(partial(tokenizer.decode, skip_special_tokens=skips), prompt, begun)
        sayings += [(before + both[0], before + both[1]) for before in ("", echo)]
    return sayings


def _is_all(text: str, choice: Mapping[str, Any], said: str, before_last: str) -> bool:
    """Whether a text is all that was said, up to a stop string or to the token that ended it."""
    stop = choice.get("stop_reason")
    if isinstance(stop, str):
        return said.startswith(text) and (text.endswith(stop) or said.startswith(stop, len(text)))
    ends = [said, before_last] if choice.get("finish_reason") == "stop" else [said]
    return text.strip() in [end.strip() for end in ends]


def _found_until(text: str, said: str, at_its_beginning: bool) -> tuple[int, str]:
    """How long the longest beginning of a text is that stands in what was said, and what follows there."""
    least, most = 0, len(text)
    while least < most:
        middle = (least + most + 1) // 2
        begins = said.startswith(text[:middle]) if at_its_beginning else text[:middle] in said
        least, most = (middle, most) if begins else (least, middle - 1)
    start = 0 if at_its_beginning else said.find(text[:least])
    return least, said[start + least :]


def _shown(text: str) -> str:
    return repr(text[:_SHOWN]) if text else "nothing"
