"""Builds the responses and events of /v1/completions from a completion's pieces."""

from __future__ import annotations

from collections.abc import Sequence

from spool.scheduler.messages import TokenLogprobs
from spool.services.gateway.choice import Piece
from spool.services.gateway.completion import Completion, Usage
from spool.services.gateway.http.openai_requests import CompletionBody
from spool.services.gateway.http.openai_responses import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionShape,
    CompletionTokensDetails,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    SpoolUsage,
    UsageShape,
)
from spool.services.gateway.token_strings import TokenStrings

# OpenAI writes this number for log probabilities that JSON cannot hold.
MIN_LOGPROB = -9999.0


def usage_shape(usage: Usage) -> UsageShape:
    return UsageShape(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=usage.accepted,
            rejected_prediction_tokens=usage.drafted - usage.accepted,
        ),
        spool=SpoolUsage(drafted=usage.drafted, accepted=usage.accepted, seed=usage.seed),
    )


def prompt_shape(
    tokens: Sequence[int], entries: Sequence[TokenLogprobs], count: int, strings: TokenStrings
) -> PromptLogprobs:
    """Of a prompt's tokens and of the `count` likeliest at each place; `entries` has one for each token but the
    first."""

    def shape(token: int, logprob: float, rank: int | None) -> PromptLogprob:
        return PromptLogprob(logprob=max(logprob, MIN_LOGPROB), rank=rank, decoded_token=strings.of(token).text)

    found: PromptLogprobs = [None] * (len(tokens) - len(entries))
    for entry in entries:
        top = {token: shape(token, logprob, place) for place, (token, logprob) in enumerate(entry.top[:count], 1)}
        found.append({entry.token_id: shape(entry.token_id, entry.logprob, None), **top})
    return found


class CompletionBuilder:
    """For /v1/completions."""

    def __init__(self, completion: Completion, strings: TokenStrings, asked: CompletionBody) -> None:
        self._completion = completion
        self._strings = strings
        self._logprobs = asked.logprobs
        self._prompt_logprobs = asked.prompt_logprobs
        # Choices whose log probabilities are still to begin with the prompt's.
        self._echoes = {choice.index for choice in completion.choices} if asked.echo else set()
        self._token_ids = bool(asked.return_token_ids)
        # Choices that have not shown the ids of their prompt yet.
        self._unshown = {choice.index for choice in completion.choices}
        self._id = f"cmpl-{completion.request_id}"

    def whole(self, pieces: Sequence[Piece]) -> CompletionShape:
        """Of all choices, each in one piece."""
        shape = self._chunk(*[self._choice(piece) for piece in pieces])
        shape.usage = usage_shape(self._completion.usage())
        return shape

    def _choice(self, piece: Piece) -> CompletionChoice:
        """Of a part of it, or of all."""
        index, logprobs = piece.index, None
        if piece.logprobs or index in self._echoes:
            logprobs = self._logprobs_of(index, piece.prompt_logprobs, piece.logprobs, piece.offsets)
        choice = CompletionChoice(index=index, text=piece.text, logprobs=logprobs, finish_reason=piece.finish_reason)
        if piece.finish_reason is not None:
            choice.stop_reason = piece.stop_reason
            if (receipt := self._completion.receipt(index)) is not None:
                choice.receipt = receipt
        if self._prompt_logprobs is not None:
            tokens = self._completion.prompt_of(index).tokens
            choice.prompt_logprobs = prompt_shape(tokens, piece.prompt_logprobs, self._prompt_logprobs, self._strings)
        self._add_ids(choice, index, piece.tokens)
        return choice

    def _add_ids(self, choice: CompletionChoice, index: int, tokens: Sequence[int]) -> None:
        if not self._token_ids:
            return
        choice.token_ids = list(tokens)
        if index in self._unshown:
            self._unshown.discard(index)
            choice.prompt_token_ids = list(self._completion.prompt_of(index).tokens)

    def first_chunks(self) -> list[CompletionShape]:
        return []

    def chunks(self, piece: Piece) -> list[CompletionShape]:
        return [self._chunk(self._choice(piece))]

    def usage_chunk(self) -> CompletionShape:
        shape = self._chunk()
        shape.usage = usage_shape(self._completion.usage())
        return shape

    def _chunk(self, *choices: CompletionChoice) -> CompletionShape:
        return CompletionShape(
            id=self._id,
            object="text_completion",
            created=self._completion.created,
            model=self._completion.model,
            system_fingerprint=self._completion.fingerprint,
            choices=list(choices),
        )

    def _logprobs_of(
        self, index: int, prompt: Sequence[TokenLogprobs], entries: Sequence[TokenLogprobs], offsets: Sequence[int]
    ) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        shape = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if index in self._echoes:
            self._echoes.discard(index)
            echoed = self._completion.prompt_of(index)
            shape.tokens.append(self._strings.of(echoed.tokens[0]).text)
            shape.token_logprobs.append(None)
            shape.top_logprobs.append(None)
            shape.text_offset.extend(echoed.offsets)
            self._extend(shape, prompt)
        self._extend(shape, entries)
        shape.text_offset.extend(offsets)
        return shape

    def _extend(self, shape: CompletionLogprobs, entries: Sequence[TokenLogprobs]) -> None:
        for entry in entries:
            top = entry.top[: self._logprobs]
            shape.tokens.append(self._strings.of(entry.token_id).text)
            own = max(entry.logprob, MIN_LOGPROB)
            shape.token_logprobs.append(own)
            # Several tokens may have one text: the likeliest stands for them, but for the sampled one, which is there
            # whether it is among the likeliest or not.
            likeliest: dict[str, float] = {}
            for token, logprob in top:
                likeliest.setdefault(self._strings.of(token).text, max(logprob, MIN_LOGPROB))
            likeliest[shape.tokens[-1]] = own
            shape.top_logprobs.append(likeliest)
