"""Models of OpenAI's responses; openai_errors has the error. Fields that were not set are not written."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from spool.services.gateway.choice import EndReason


class SpoolUsage(BaseModel):
    """Tokens proposed by draft workers, how many of them were accepted and delivered, and the seed of choice 0."""

    drafted: int
    accepted: int
    seed: int


class CompletionTokensDetails(BaseModel):
    """What became of the draft tokens. Rejected ones are no part of the output, and do not count as its tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class PromptTokensDetails(BaseModel):
    """Tokens whose KV the target had already, from other requests."""

    cached_tokens: int


class UsageShape(BaseModel):
    prompt_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails
    spool: SpoolUsage


class PromptLogprob(BaseModel):
    """In vLLM's form. `rank` 1 is the likeliest token; the prompt's own token has none where it is not among those
    asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""By token id, for each token of the prompt; the first one has none."""


# --- chat -------------------------------------------------------------------------------------------------------------


class TopLogprob(BaseModel):
    """`token` is text; for a part of a character, its bytes written as \\xe2\\x80. `bytes` are the token's own, null
    for one that is not shown, such as the end."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


ChatEndReason = EndReason | Literal["tool_calls"]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(BaseModel):
    """`arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    """`content` is null where the model only thought or called."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same under vLLM's newer name."""
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatEndReason | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    receipt: dict[str, Any] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageShape
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(BaseModel):
    """`name` only where the call begins; the pieces of `arguments` follow each other."""

    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """`id` and `type` only where the call begins."""

    index: int
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatEndReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    """Of the tokens that no event before has shown."""
    receipt: dict[str, Any] | None = None
    """In the last event of the choice."""


class ChatChunk(BaseModel):
    """`prompt_token_ids` stands in the first event."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageShape | None = None
    prompt_token_ids: list[int] | None = None


# --- completions ------------------------------------------------------------------------------------------------------


class CompletionLogprobs(BaseModel):
    """With an echo, of the prompt's tokens first; the first of these has no log probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndReason | None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    """In a stream, in the first event of the choice."""
    receipt: dict[str, Any] | None = None
    """In a stream, in the last event of the choice."""


class CompletionShape(BaseModel):
    """A whole response or an event of a stream; events carry `usage` only if the client asks for it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageShape | None = None


# --- the rest ---------------------------------------------------------------------------------------------------------


class ModelShape(BaseModel):
    """`root` is the target model's hub id or the last part of its path, whatever name it is served under;
    `quantization` that of its weights as they are computed with; `fingerprint` the parts that `system_fingerprint`
    names: what must be alike for equal bits."""

    id: str
    root: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    quantization: str
    system_fingerprint: str
    fingerprint: dict[str, str]


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelShape]


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(BaseModel):
    prompt: str


class Status(BaseModel):
    status: Literal["ok"]


class Version(BaseModel):
    version: str


class WorkerShape(BaseModel):
    worker_id: str
    role: Literal["draft", "target"]
    sequences: int
    pages_in_use: int
    total_pages: int


class Load(BaseModel):
    """`server_load` counts unfinished sequences: `running` plus `waiting`."""

    server_load: int
    running: int
    waiting: int
    pages_in_use: int
    total_pages: int
    workers: list[WorkerShape]
