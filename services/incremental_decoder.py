"""Text of a growing token sequence, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

_REPLACEMENT = "\ufffd"

# Tokens before the first that the decoder looks at, to get a space or a character between the two right.
_CONTEXT_TOKENS = 8

# Pieces whose tokens are decoded again with the next ones: one alone may be a special token, of no text.
_CONTEXT_PIECES = 4

# Past this many tokens without a whole character at the end, it is none that will be completed.
_LONGEST_WAIT = 32


class IncrementalDecoder:
    """Turns tokens into text that never ends in half a character.

    The pieces of `push` and `finish` put together are what decoding all tokens at once gives, bytes that make no
    character aside. A token's text depends on its neighbours, so each piece is the difference between two decodings of
    a short window of tokens.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._out = ""
        # A window begins at a whole character, of at most four tokens, or decoders might take all of it for broken.
        for count in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + 4):
            self._window = list(context[-count:])
            self._out = self._decode()
            if not self._out.startswith(_REPLACEMENT):
                break
        # Places in the window before which all text is out; it is always cut at one.
        self._settled = [len(self._window)]

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain now and was not before; often empty."""
        return "".join(self._push(token) for token in tokens)

    def finish(self) -> str:
        """What was held back, at the end of the sequence."""
        return self._emit(self._decode())

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode()
        if text.endswith(_REPLACEMENT) and len(self._window) - self._settled[-1] < _LONGEST_WAIT:
            # Decoders differ in how many marks stand for the bytes of one unfinished character.
            return self._emit(text.rstrip(_REPLACEMENT))
        piece = self._emit(text)
        self._settled.append(len(self._window))
        if len(self._settled) > _CONTEXT_PIECES:
            cut = self._settled.pop(0)
            self._settled = [place - cut for place in self._settled]
            del self._window[:cut]
            self._out = self._decode()
        return piece

    def _emit(self, text: str) -> str:
        piece = text[len(self._out) :]
        if piece:
            self._out = text
        return piece

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)
        return text
