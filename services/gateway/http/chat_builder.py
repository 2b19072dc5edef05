"""Builds the responses and events of /v1/chat/completions from a completion's pieces."""

from __future__ import annotations

from collections.abc import Sequence

from spool.scheduler.messages import TokenLogprobs
from spool.services.gateway.answers.deltas import AnswerDelta, ArgumentsDelta, CallDelta, ContentDelta, ReasoningDelta
from spool.services.gateway.answers.reader import AnswerForm, AnswerReader
from spool.services.gateway.choice import Piece
from spool.services.gateway.completion import Completion
from spool.services.gateway.http.completion_builder import MIN_LOGPROB, prompt_shape, usage_shape
from spool.services.gateway.http.openai_requests import ChatBody
from spool.services.gateway.http.openai_responses import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatEndReason,
    ChatLogprobs,
    ChatMessage,
    FunctionDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)
from spool.services.gateway.token_strings import TokenStrings


class _ChoiceReader:
    """The deltas and log probabilities of one choice that no event has carried yet."""

    def __init__(self, form: AnswerForm, include_reasoning: bool) -> None:
        self._reader = AnswerReader(form)
        self._include_reasoning = include_reasoning
        self._logprobs: list[TokenLogprobs] = []

    def read(self, piece: Piece) -> list[AnswerDelta]:
        self._logprobs += piece.logprobs
        deltas = self._reader.push(piece.text, piece.finish_reason is not None)
        return [delta for delta in deltas if self._include_reasoning or not isinstance(delta, ReasoningDelta)]

    def take_logprobs(self) -> list[TokenLogprobs]:
        taken, self._logprobs = self._logprobs, []
        return taken

    def finish_reason(self, piece: Piece) -> ChatEndReason | None:
        # A call that a stop string has cut is not to be carried out.
        complete = self._reader.called and not self._reader.cut
        return "tool_calls" if piece.finish_reason == "stop" and complete else piece.finish_reason


class ChatBuilder:
    """For /v1/chat/completions."""

    def __init__(self, completion: Completion, strings: TokenStrings, asked: ChatBody) -> None:
        self._completion = completion
        self._strings = strings
        self._logprobs = bool(asked.logprobs)
        self._prompt_logprobs = asked.prompt_logprobs
        self._token_ids = bool(asked.return_token_ids)
        self._unshown: list[list[int]] = [[] for _ in completion.choices]
        """Of each choice, the ids of tokens that are not shown yet."""
        self._id = f"chatcmpl-{completion.request_id}"
        self._readers = [_ChoiceReader(completion.form, asked.include_reasoning) for _ in completion.choices]

    def whole(self, pieces: Sequence[Piece]) -> ChatCompletion:
        """Of all choices, each in one piece."""
        choices = [self._choice(piece) for piece in pieces]
        completion = ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._completion.created,
            model=self._completion.model,
            system_fingerprint=self._completion.fingerprint,
            choices=choices,
            usage=usage_shape(self._completion.usage()),
        )
        if self._prompt_logprobs is not None:
            tokens = self._completion.prompts[0].tokens
            completion.prompt_logprobs = prompt_shape(
                tokens, pieces[0].prompt_logprobs, self._prompt_logprobs, self._strings
            )
        if self._token_ids:
            completion.prompt_token_ids = list(self._completion.prompts[0].tokens)
        return completion

    def _choice(self, piece: Piece) -> ChatChoice:
        """All of it."""
        reader = self._readers[piece.index]
        choice = ChatChoice(
            index=piece.index,
            message=self._message(piece.index, reader.read(piece)),
            logprobs=self._logprobs_of(piece.index, piece.logprobs),
            finish_reason=reader.finish_reason(piece),
            stop_reason=piece.stop_reason,
        )
        if (receipt := self._completion.receipt(piece.index)) is not None:
            choice.receipt = receipt
        if self._token_ids:
            choice.token_ids = list(piece.tokens)
        return choice

    def first_chunks(self) -> list[ChatChunk]:
        """The role of the speaker, once for each choice."""
        chunks = [
            self._chunk(
                ChatChunkChoice(
                    index=choice.index, delta=ChatDelta(role="assistant", content=""), logprobs=None, finish_reason=None
                )
            )
            for choice in self._completion.choices
        ]
        if self._token_ids:
            chunks[0].prompt_token_ids = list(self._completion.prompts[0].tokens)
        return chunks

    def chunks(self, piece: Piece) -> list[ChatChunk]:
        """One for each part of the answer; none where nothing has become certain."""
        reader = self._readers[piece.index]
        self._unshown[piece.index] += piece.tokens
        shapes = [self._delta(piece.index, delta) for delta in reader.read(piece)]
        if not shapes and piece.finish_reason is not None:
            shapes = [ChatDelta()]
        choices = [
            ChatChunkChoice(index=piece.index, delta=shape, logprobs=None, finish_reason=None) for shape in shapes
        ]
        if choices:
            logprobs = reader.take_logprobs()
            choices[0].logprobs = self._logprobs_of(piece.index, logprobs) if logprobs else None
            choices[-1].finish_reason = reader.finish_reason(piece)
            if piece.finish_reason is not None:
                choices[-1].stop_reason = piece.stop_reason
                if (receipt := self._completion.receipt(piece.index)) is not None:
                    choices[-1].receipt = receipt
            if self._token_ids:
                choices[0].token_ids, self._unshown[piece.index] = self._unshown[piece.index], []
        return [self._chunk(choice) for choice in choices]

    def usage_chunk(self) -> ChatChunk:
        chunk = self._chunk()
        chunk.usage = usage_shape(self._completion.usage())
        return chunk

    def _chunk(self, *choices: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._completion.created,
            model=self._completion.model,
            system_fingerprint=self._completion.fingerprint,
            choices=list(choices),
        )

    def _delta(self, choice: int, delta: AnswerDelta) -> ChatDelta:
        match delta:
            case ContentDelta(text):
                return ChatDelta(content=text)
            case ReasoningDelta(text):
                return ChatDelta(reasoning_content=text, reasoning=text)
            case CallDelta(index, name):
                call_id = self._call_id(choice, index)
                begin = FunctionDelta(name=name, arguments="")
                return ChatDelta(tool_calls=[ToolCallDelta(index=index, id=call_id, type="function", function=begin)])
            case ArgumentsDelta(index, text):
                return ChatDelta(tool_calls=[ToolCallDelta(index=index, function=FunctionDelta(arguments=text))])

    def _message(self, choice: int, deltas: Sequence[AnswerDelta]) -> ChatMessage:
        content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
        arguments: list[list[str]] = []
        names: list[str] = []
        for delta in deltas:
            if isinstance(delta, CallDelta):
                names.append(delta.name)
                arguments.append([])
            elif isinstance(delta, ArgumentsDelta):
                arguments[delta.index].append(delta.text)
        message = ChatMessage(role="assistant", content=content, refusal=None)
        if reasoning:
            message.reasoning_content = message.reasoning = reasoning
        if names:
            message.tool_calls = [
                ToolCall(
                    id=self._call_id(choice, index),
                    type="function",
                    function=CalledFunction(name=name, arguments="".join(arguments[index])),
                )
                for index, name in enumerate(names)
            ]
        if not content and (reasoning or names):
            message.content = None
        return message

    def _call_id(self, choice: int, call: int) -> str:
        return self._completion.form.call_id(self._completion.request_id, choice, call)

    def _logprobs_of(self, choice: int, entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        content = []
        for entry in entries:
            top = [self._top(choice, token, logprob) for token, logprob in entry.top]
            own = self._top(choice, entry.token_id, entry.logprob)
            content.append(TokenLogprob(**dict(own), top_logprobs=top))
        return ChatLogprobs(content=content, refusal=None)

    def _top(self, choice: int, token: int, logprob: float) -> TopLogprob:
        string = self._strings.of(token)
        shown = self._completion.choices[choice].shows(token, string.special)
        data = list(string.data) if shown else None
        return TopLogprob(token=string.text, logprob=max(logprob, MIN_LOGPROB), bytes=data)
