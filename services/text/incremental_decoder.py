"""Text of a growing token sequence, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tokenizers
from tokenizers.decoders import DecodeStream

_REPLACEMENT = "\ufffd"

# Tokens before the first one that the decoder sees: some decoders drop the space of the first word.
_CONTEXT_TOKENS = 8

# Bytes that have not made a character after this many tokens never will.
_MAX_HELD_TOKENS = 32


def whole_text(decode: Callable[[Sequence[int]], str], tokens: Sequence[int], begun: int) -> str:
    """The text of tokens up to the character that the last `begun` of them begin without ending it."""
    text = decode(tokens)
    # Decoders differ in how many marks stand for its bytes; one of the tokens may also have characters before it.
    return max(text.rstrip(_REPLACEMENT), decode(tokens[:-begun]), key=len) if begun else text


class IncrementalDecoder:
    """Turns tokens into text that never ends in half a character.

    The pieces of `push` and `finish` joined together equal the text of all tokens decoded at once, apart from bytes
    that make no character. tokenizers' DecodeStream does the work. Added here is what DecodeStream lacks: an end, a
    limit on the text that it holds back, and an answer to bytes that make no character, at which DecodeStream raises.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
        begun: int = 0,
    ) -> None:
        """`context` holds the tokens before the first one; its last `begun` tokens have the first bytes of a character,
        with which the text begins."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._begun = begun
        # A context that begins inside a character, of at most four tokens, may be taken for broken bytes as a whole.
        contexts = (list(context[-count:]) for count in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + 4))
        self._settled = min(contexts, key=lambda tokens: whole_text(self._decode, tokens, begun).count(_REPLACEMENT))
        self._held: list[int] = []
        self._repeated = 0
        self._begin()

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens make certain; often empty."""
        return "".join(self._push(token) for token in tokens)

    def finish(self) -> str:
        """The text that was held back, at the end of the sequence."""
        text = self._held_text()
        self._held, self._begun = [], 0
        return text

    @property
    def held_characters(self) -> int:
        """Whole characters that are held back with a later one."""
        return len(self._held_text().rstrip(_REPLACEMENT)) if self._held else 0

    def _push(self, token: int) -> str:
        self._held.append(token)
        try:
            piece = self._stream.step(self._tokenizer, token)
        except Exception as error:  # the library raises nothing more special
            if "Invalid prefix" not in str(error):
                raise
            # Broken bytes have changed the text of the whole bytes before them.
            return self._give_up()
        if piece is None:
            return self._give_up() if len(self._held) >= _MAX_HELD_TOKENS else ""
        # A character whose first bytes the context had stays whole.
        first = self._settled[len(self._settled) - self._begun :]
        self._settled, self._held, self._begun = [*first, *self._held], [], 0
        piece, self._repeated = piece[self._repeated :], 0
        return piece

    def _give_up(self) -> str:
        text = self.finish()
        self._begin()
        return text

    def _begin(self) -> None:
        self._stream = DecodeStream(self._settled, self._skip_special_tokens)
        # DecodeStream's first piece repeats a context that ends in half a character.
        repeats = self._decode(self._settled).endswith(_REPLACEMENT)
        self._repeated = self._characters_out() if repeats else 0

    def _held_text(self) -> str:
        return self._decode([*self._settled, *self._held])[self._characters_out() :]

    def _characters_out(self) -> int:
        """Characters of the settled tokens' text that come before the text held back."""
        return len(whole_text(self._decode, self._settled, self._begun))

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens)
        return text
