"""One choice of a completion: the text of one sequence as it grows."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from spool.scheduler.messages import EmitTokens, FinishReason, TokenLogprobs
from spool.services.backend.interface import GenerationRequest
from spool.services.backend.sequence_stream import SequenceFailedError
from spool.services.gateway.answers.reasoning import Reasoning, ThoughtFinder
from spool.services.gateway.metrics import SequenceMeter
from spool.services.gateway.options import GenerationOptions
from spool.services.gateway.stop_strings import StopStringCutter
from spool.services.scheduler_client.remote_stream import RemoteStream
from spool.services.text.incremental_decoder import IncrementalDecoder

EndReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of a choice that has become certain, and the tokens that are delivered with this text.

    A token is delivered with the first text that is certain after it. `offsets` say how many whole characters of the
    choice's text come before each token; `logprobs` is empty unless the client asked for log probabilities. Where the
    client asked for those of the prompt, the first piece has them, of every token of the prompt but the first. The last
    piece of a choice has `finish_reason` "stop" or "length"; its `stop_reason` is the stop string, the id of the stop
    token, or None for the model's own end.
    """

    index: int
    text: str
    tokens: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of one choice as one."""
    last = pieces[-1]
    return Piece(
        last.index,
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        tuple(offset for piece in pieces for offset in piece.offsets),
        tuple(entry for piece in pieces for entry in piece.logprobs),
        tuple(entry for piece in pieces for entry in piece.prompt_logprobs),
        last.finish_reason,
        last.stop_reason,
    )


class Choice:
    """Reads one sequence and counts what it delivers.

    `completion_tokens` counts the tokens up to and including the stop token or the token that completed a stop string.
    Later tokens of the same round are neither delivered nor counted, nor are they among `accepted`. `cached` counts the
    prompt's tokens whose KV the target had already.
    """

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        stream: RemoteStream,
        decoder: IncrementalDecoder,
        meter: SequenceMeter,
        options: GenerationOptions,
        echo: str = "",
        reasoning: Reasoning = Reasoning.NONE,
    ) -> None:
        """`echo` is put before the output. Stop strings do not end the output within its `reasoning`. With `max_tokens`
        0 of the request no token is delivered."""
        self.index = index
        self.request = request
        self.completion_tokens = 0
        self.drafted = 0
        self.accepted = 0
        self.cached = 0
        self.finish_reason: EndReason | None = None
        self.digested: list[tuple[int, int]] = []
        """All delivered tokens, each with the digest of the logits that it was sampled from, where asked for."""
        self._stream = stream
        self._decoder = decoder
        self._meter = meter
        self._thoughts = ThoughtFinder(reasoning)
        self._cutter = StopStringCutter(options.stop, options.include_stop_str_in_output)
        self._min_tokens = options.min_tokens
        self._stop_token_ids = request.stop_token_ids
        self._skips_special = options.skip_special_tokens
        self._asked_token_ids = frozenset(options.stop_token_ids)
        # Log probabilities of the prompt come with the first tokens, in one piece with the prompt's text.
        scored = options.prompt_logprobs is not None
        self._echo = "" if scored else echo
        self._only_prompt = request.max_tokens == 0
        self._characters = len(echo)
        self._text: list[str] = [echo] if scored else []
        self._tokens: list[int] = []
        self._offsets: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []

    @property
    def fingerprints(self) -> Mapping[str, Mapping[str, str]]:
        """Those of the targets that computed the output up to now."""
        return self._stream.fingerprints

    @property
    def workers(self) -> Iterable[str]:
        """The ids of these targets."""
        return self._stream.workers

    def phases(self) -> tuple[float, float, float]:
        """Seconds of waiting with the scheduler, of the prompt, and of the output from its first tokens on."""
        return self._meter.phases(self._stream.queue_seconds)

    async def admitted(self) -> None:
        """Waits until the scheduler has taken the sequence in. Raises why it has not."""
        await self._stream
        self._meter.admitted()

    def cancel(self) -> None:
        """Frees the sequence; has no effect after the sequence's end."""
        if self.finish_reason is None and self._stream.refusal is None:
            self._stream.cancel()
            self._meter.aborted()

    def shows(self, token: int, special: bool) -> bool:
        """Whether the token's text is a part of the choice's; `special`: whether it is a special token."""
        return token not in self._stop_token_ids and not (special and self._skips_special)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Ends the sequence when a stop string is complete. Raises the errors of the stream."""
        if self._echo:
            yield Piece(self.index, self._echo)
        stop_token: int | None = None
        try:
            async for emission in self._stream:
                stop_token = self._take(emission)
                if self._cutter.hit is not None:
                    break
                if any(self._text):
                    yield self._piece()
        except Exception:
            self._meter.failed()
            raise
        if self._cutter.hit is None:
            self._add(self._decoder.finish())
            self._cut(*self._thoughts.finish())
        if self._cutter.hit is not None:
            self._stream.cancel()
            yield self._last("stop", self._cutter.hit)
            return
        self._text.append(self._cutter.finish())
        match self._stream.finish_reason:
            case FinishReason.STOP | FinishReason.LENGTH if self._only_prompt:
                yield self._last("length", None)
            case FinishReason.STOP:
                yield self._last("stop", stop_token if stop_token in self._asked_token_ids else None)
            case FinishReason.LENGTH:
                yield self._last("length", None)
            case reason:
                self._meter.failed()
                raise SequenceFailedError(f"the sequence ended early: {reason}")

    def _take(self, emission: EmitTokens) -> int | None:
        """Takes in tokens up to the end of the text; returns the stop token, if one came."""
        taken = 0
        stop_token = None
        self._prompt_logprobs.extend(emission.prompt_logprobs)
        self.cached += emission.cached
        if self._only_prompt:
            return None
        for place, token in enumerate(emission.tokens):
            taken += 1
            self._tokens.append(token)
            self._offsets.append(self._characters + self._decoder.held_characters)
            if emission.logits_digests:
                self.digested.append((token, emission.logits_digests[place]))
            if emission.logprobs:
                self._logprobs.append(emission.logprobs[place])
            if token in self._stop_token_ids:
                stop_token = token
                break
            text = self._decoder.push((token,))
            self._add(text, may_end=self.completion_tokens + taken > self._min_tokens)
            if self._cutter.hit is not None:
                break
        accepted = min(emission.accepted, taken)
        self.completion_tokens += taken
        self.drafted += emission.drafted
        self.accepted += accepted
        self._meter.round(taken, emission.drafted, accepted)
        return stop_token

    def _add(self, text: str, may_end: bool = True) -> None:
        self._characters += len(text)
        self._cut(*self._thoughts.push(text), may_end)

    def _cut(self, thought: str, text: str, may_end: bool = True) -> None:
        self._text.append(thought + (self._cutter.push(text) if may_end else text))

    def _last(self, finish_reason: EndReason, stop_reason: str | int | None) -> Piece:
        self.finish_reason = finish_reason
        self._meter.finished(finish_reason)
        return self._piece(stop_reason)

    def _piece(self, stop_reason: str | int | None = None) -> Piece:
        piece = Piece(
            self.index,
            "".join(self._text),
            tuple(self._tokens),
            tuple(self._offsets),
            tuple(self._logprobs),
            tuple(self._prompt_logprobs),
            self.finish_reason,
            stop_reason,
        )
        for pending in (self._text, self._tokens, self._offsets, self._logprobs, self._prompt_logprobs):
            pending.clear()
        return piece
