"""Builds the responses and events of /v1/completions from a completion's pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.messages import TokenLogprobs
from services.gateway.choice import Piece
from services.gateway.completion import Completion, Usage
from services.gateway.http.openai_responses import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionShape,
    CompletionTokensDetails,
    SpoolUsage,
    UsageShape,
)
from services.gateway.token_strings import TokenStrings

# OpenAI writes this number for log probabilities that JSON cannot hold.
MIN_LOGPROB = -9999.0


def usage_shape(usage: Usage) -> UsageShape:
    return UsageShape(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=usage.accepted,
            rejected_prediction_tokens=usage.drafted - usage.accepted,
        ),
        spool=SpoolUsage(drafted=usage.drafted, accepted=usage.accepted, seed=usage.seed),
    )


@dataclass(slots=True)
class _Whole:
    """The pieces of one choice joined together."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    last: Piece | None = None

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.logprobs.extend(piece.logprobs)
        self.offsets.extend(piece.offsets)
        self.last = piece


async def _wholes(completion: Completion) -> list[tuple[_Whole, Piece]]:
    wholes = [_Whole() for _ in completion.choices]
    async for piece in completion.pieces():
        wholes[piece.index].add(piece)
    return [(whole, whole.last) for whole in wholes if whole.last is not None]


class CompletionBuilder:
    """For /v1/completions; `logprobs` says whether the client asked for log probabilities."""

    def __init__(self, completion: Completion, strings: TokenStrings, logprobs: bool) -> None:
        self._completion = completion
        self._strings = strings
        self._logprobs = logprobs
        self._id = f"cmpl-{completion.request_id}"

    async def whole(self) -> CompletionShape:
        choices = [
            CompletionChoice(
                index=last.index,
                text="".join(whole.text),
                logprobs=self._logprobs_of(whole.logprobs, whole.offsets),
                finish_reason=last.finish_reason,
                stop_reason=last.stop_reason,
            )
            for whole, last in await _wholes(self._completion)
        ]
        shape = self._chunk(*choices)
        shape.usage = usage_shape(self._completion.usage())
        return shape

    def first_chunks(self) -> list[CompletionShape]:
        return []

    def chunks(self, piece: Piece) -> list[CompletionShape]:
        choice = CompletionChoice(
            index=piece.index,
            text=piece.text,
            logprobs=self._logprobs_of(piece.logprobs, piece.offsets) if piece.logprobs else None,
            finish_reason=piece.finish_reason,
        )
        if piece.finish_reason is not None:
            choice.stop_reason = piece.stop_reason
        return [self._chunk(choice)]

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
            choices=list(choices),
        )

    def _logprobs_of(self, entries: Sequence[TokenLogprobs], offsets: Sequence[int]) -> CompletionLogprobs | None:
        if not self._logprobs:
            return None
        return CompletionLogprobs(
            tokens=[self._strings.of(entry.token_id).text for entry in entries],
            token_logprobs=[max(entry.logprob, MIN_LOGPROB) for entry in entries],
            top_logprobs=[self._top(entry) for entry in entries],
            text_offset=list(offsets),
        )

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        return {self._strings.of(token).text: max(logprob, MIN_LOGPROB) for token, logprob in entry.top}
