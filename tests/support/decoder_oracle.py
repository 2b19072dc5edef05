"""An incremental decoder without tokenizers' DecodeStream: the oracle for services/text/incremental_decoder.py."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

_REPLACEMENT = "\ufffd"

# Tokens before the first one that the decoder sees: some decoders drop the space of the first word.
_CONTEXT_TOKENS = 8

# Pieces whose tokens are decoded again with the next ones: a single one may be a special token, of no text.
_CONTEXT_PIECES = 4

# Bytes that have not made a character after this many tokens never will.
_MAX_WAIT = 32


class OracleDecoder:
    """Each piece is the difference between two decodings of a short window of tokens.

    The window holds four pieces of context or more, so that neither a special token nor broken bytes hide the context.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._out = ""
        # A window that begins inside a character, of at most four tokens, may be taken for broken bytes as a whole.
        for count in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + 4):
            self._window = list(context[-count:])
            self._out = self._decode()
            if not self._out.startswith(_REPLACEMENT):
                break
        # Places in the window before which all text is out; the window is always cut at one of them.
        self._settled = [len(self._window)]

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens make certain; often empty."""
        return "".join(self._push(token) for token in tokens)

    def finish(self) -> str:
        """The text that was held back, at the end of the sequence."""
        return self._emit(self._decode())

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode()
        if text.endswith(_REPLACEMENT) and len(self._window) - self._settled[-1] < _MAX_WAIT:
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
