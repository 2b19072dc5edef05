"""Text and bytes of single tokens, for reports of log probabilities."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from spool.services.text.tokenizer import ModelTokenizer

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_MARK = "▁"
_CACHED_TOKENS = 65536
_CHARACTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class TokenString:
    """`text` is the token's own text; for a token that is part of a character, its bytes written as \\xe2\\x80."""

    text: str
    data: bytes
    special: bool = False


class TokenStrings:
    """Looks up tokens and caches the results."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._alphabet = _byte_alphabet()
        self.of = lru_cache(_CACHED_TOKENS)(self._look_up)

    def begun_character(self, tokens: Sequence[int], skip_special_tokens: bool) -> int:
        """How many of the last tokens have the first bytes of a character that they do not end."""
        data, count = b"", 0
        while count < len(tokens) and len(data) < _CHARACTER_BYTES:
            count += 1
            string = self.of(tokens[-count])
            data = (b"" if string.special and skip_special_tokens else string.data) + data
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            decoder.decode(data)
            if decoder.getstate()[0]:
                return count
        return 0

    def _look_up(self, token: int) -> TokenString:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        entry = self._tokenizer.token_text(token)
        if entry is None:
            return TokenString(text, text.encode())
        if entry in self._tokenizer.special_texts:
            return TokenString(text, text.encode(), special=True)
        data = self._bytes(entry) if _REPLACEMENT in text and _REPLACEMENT not in entry else None
        if data is not None:
            try:
                return TokenString(data.decode(), data)
            except UnicodeDecodeError:
                return TokenString("".join(f"\\x{byte:02x}" for byte in data), data)
        if entry.startswith(_WORD_MARK) and not text.startswith(" "):
            # Decoders drop the space before the first word of a text.
            text = f" {text}"
        return TokenString(text, text.encode())

    def _bytes(self, entry: str) -> bytes | None:
        """The bytes that a vocabulary's entry stands for; None for an entry that is no part of a character."""
        byte = _BYTE_TOKEN.fullmatch(entry)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        if all(letter in self._alphabet for letter in entry):
            return bytes(self._alphabet[letter] for letter in entry)
        return None


class TokenNumbers(TokenStrings):
    """Puts a token's id in place of its text, in vLLM's form."""

    def _look_up(self, token: int) -> TokenString:
        return replace(super()._look_up(token), text=f"token_id:{token}")


@cache
def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable bytes as themselves, the others as letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(0x100 + number): byte for number, byte in enumerate(others)})
    return alphabet
