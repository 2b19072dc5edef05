"""Bodies of OpenAI's requests, with the fields and routes that other servers commonly add.

Unknown fields are refused, as OpenAI does: an error is better than an option that silently does nothing. Forms are
checked here; ranges are checked in spool.services.gateway.options, for both APIs.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal

from pydantic import Field, model_validator

from spool.services.gateway.answers.tools import ToolUse
from spool.services.gateway.http.openai_fields import (
    Body,
    CacheSalt,
    CountOfTokens,
    LogitBias,
    OptionalTexts,
    OptionalTokenIds,
    PlainText,
    Prompts,
    Stop,
    TemplateOptions,
    TokenIds,
    WholeNumber,
    wrong,
)
from spool.services.gateway.http.openai_messages import (
    Message,
    Messages,
    ToolChoice,
    ToolDefinitions,
    for_template,
    tool_use,
)
from spool.services.gateway.http.openai_structure import ResponseFormat, StructuredOutputs
from spool.services.gateway.options import ChatPrompt, GenerationOptions, TextPrompt, options_given, shown
from spool.services.gateway.structure import Structure


class SpoolOptions(Body):
    """How a request is decoded; the output does not depend on these options."""

    draft_length: CountOfTokens | None = None
    """Tokens to propose in each round; 0 turns speculation off."""
    speculation: bool | None = None
    """False turns speculation off."""
    proposer: Literal["draft", "lookup", "none"] | None = None
    """Who may propose tokens; all that the server has unless given."""

    def effective_draft_length(self) -> int | None:
        return 0 if self.speculation is False else self.draft_length

    @model_validator(mode="after")
    def _check(self) -> SpoolOptions:
        if self.speculation is False and self.draft_length:
            raise wrong(f"asks for a draft_length of {self.draft_length} with speculation off")
        return self


class StreamOptions(Body):
    include_usage: bool | None = None
    """Ends the stream with an event that carries the usage."""
    include_obfuscation: bool | None = None
    """Accepted, without effect."""
    continuous_usage_stats: bool | None = None
    """With include_usage, every event carries the usage up to then."""


class UsageEvents(Enum):
    """Which events of a stream carry the usage."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


# Fields that are not supported, with the values that have no effect; null has none for any field.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "documents": ([],),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
_UNSUPPORTED_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    **_UNSUPPORTED,
    "add_special_tokens": (True,),
    "suffix": ("",),
}
_UNSUPPORTED_CHAT: Mapping[str, tuple[Any, ...]] = {
    **_UNSUPPORTED,
    "add_special_tokens": (False,),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}
# Fields that have another name here.
_RENAMED = {
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "request_id": "the header x-request-id",
}
# Known fields that change no output: who asks, and how the provider should bill, cache and keep records.
_WITHOUT_EFFECT = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
}


def _refuse_unsupported(body: Any, unsupported: Mapping[str, tuple[Any, ...]]) -> Any:
    if not isinstance(body, dict):
        return body
    known = {}
    for name, value in body.items():
        if value is not None and name in _RENAMED:
            raise wrong(f"{name} is not supported by this server, use {_RENAMED[name]}", name)
        if name in unsupported:
            if value is not None and value not in unsupported[name]:
                raise wrong(f"{name} is {shown(value)}: {name} is not supported by this server", name)
        elif name not in _WITHOUT_EFFECT:
            known[name] = value
    return known


class _Generation(Body):
    model: str | None = None
    """One of the server's models; may be left out."""
    max_tokens: WholeNumber | None = None
    """Output tokens of each choice."""
    min_tokens: WholeNumber | None = None
    """Output tokens before which neither a stop token nor a stop string ends a choice; at most max_tokens."""
    n: WholeNumber | None = None
    """Choices for each prompt; choice i is sampled with `seed` + i."""
    stop: Stop = Field(default=[])
    """Texts that end the output; they are not part of it."""
    stop_token_ids: OptionalTokenIds = Field(default=[])
    """Token ids that end the output; their text is not part of it."""
    include_stop_str_in_output: bool = False
    """Leaves the stop string that ends the output at its end."""
    ignore_eos: bool = False
    """Continues after the model's own end token."""
    skip_special_tokens: bool = True
    """Leaves special tokens out of the text."""
    stream: bool | None = None
    """Sends the output as it grows, as server-sent events."""
    stream_options: StreamOptions | None = None
    seed: WholeNumber | None = None
    """Equal seeds give equal output; a request without a seed gets a random one, which the response reports."""
    temperature: float | None = None
    """Between 0 (greedy) and 100."""
    top_p: float | None = None
    """Between 0 (greedy) and 1."""
    top_k: WholeNumber | None = None
    """0 or -1 keeps all tokens."""
    min_p: float | None = None
    """Between 0 and 1."""
    presence_penalty: float | None = None
    """Between -2 and 2."""
    frequency_penalty: float | None = None
    """Between -2 and 2."""
    repetition_penalty: float | None = None
    """Between 0.01 and 100."""
    logit_bias: LogitBias = Field(default={})
    """Added to the logits of token ids, each between -100 and 100."""
    bad_words: OptionalTexts = Field(default=[])
    """Texts that the output does not contain: the tokens that each makes at the beginning of a text or after a
    space."""
    prompt_logprobs: WholeNumber | None = None
    """Log probabilities of the prompt's tokens, and of this many likeliest tokens beside each; not with `stream`."""
    return_token_ids: bool | None = None
    """Adds the ids of the prompt's tokens and of the output's."""
    return_tokens_as_token_ids: bool | None = None
    """Names tokens as `token_id:123` in log probabilities: several may have the same text."""
    receipt: bool | None = None
    """Adds to each choice what `spool replay` needs to compute it again and to compare it bit by bit; needs exact
    mode."""
    priority: WholeNumber | None = None
    """Of requests with the same API key, those with the lower number are handled earlier; 0 unless given."""
    cache_salt: CacheSalt | None = None
    """Only requests with the same API key and the same text here reuse each other's KV of a common prompt prefix."""
    response_format: ResponseFormat | None = None
    """Text unless given."""
    structured_outputs: StructuredOutputs | None = None
    """What the output must look like, in vLLM's form."""
    spool: SpoolOptions | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> _Generation:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options is given, which needs stream to be true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong("prompt_logprobs is given with stream, which must be false then", "prompt_logprobs")
        if self.structured_outputs is not None and self.response_format is not None:
            raise wrong("structured_outputs is given with response_format, must be one of them", "structured_outputs")
        return self

    def _structure(self) -> Structure | None:
        asked = self.structured_outputs or self.response_format
        return None if asked is None else asked.structure()

    @property
    def usage_events(self) -> UsageEvents:
        options = self.stream_options
        if options is None or not options.include_usage:
            return UsageEvents.NONE
        return UsageEvents.ALL if options.continuous_usage_stats else UsageEvents.LAST

    def _options(self, names: Mapping[str, str], **more: Any) -> GenerationOptions:
        values = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        values |= {"top_k": 0} if self.top_k == -1 else {}
        return options_given(
            values,
            structure=self._structure(),
            draft_length=None if self.spool is None else self.spool.effective_draft_length(),
            proposer=None if self.spool is None else self.spool.proposer,
            names={"draft_length": "spool.draft_length", **names},
            **more,
        )


class CompletionBody(_Generation):
    """/v1/completions"""

    prompt: Prompts
    """Text, a list of texts, token ids, or a list of lists of token ids."""
    echo: bool | None = None
    """Puts the prompt before the output."""
    logprobs: WholeNumber | None = None
    """Log probabilities of the output's tokens, of the prompt's too with `echo`, and of this many likeliest tokens
    beside each."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        return _refuse_unsupported(body, _UNSUPPORTED_COMPLETION)

    def options(self, timeout_seconds: float | None) -> GenerationOptions:
        return self._options(
            {"top_logprobs": "logprobs"},
            top_logprobs=self.logprobs,
            prompt_logprobs=self._prompt_logprobs(),
            timeout_seconds=timeout_seconds,
        )

    def _prompt_logprobs(self) -> int | None:
        """An echo has as many as it shows beside its own tokens."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)


class _TemplateSettings(Body):
    chat_template_kwargs: TemplateOptions = Field(default={})
    """Options of the model's chat template, such as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """Begins the assistant's answer after the last message; true unless the last message is continued."""
    continue_final_message: bool = False
    """The model goes on with the last message, in place of a new one."""

    tools: ToolDefinitions | None = None
    """Functions that the model may call."""

    @model_validator(mode="after")
    def _check_template(self) -> _TemplateSettings:
        if self.continue_final_message and self.add_generation_prompt:
            raise wrong(
                "continue_final_message and add_generation_prompt are true, must be one or the other",
                "continue_final_message",
            )
        return self

    def _prompt(self, messages: list[Message], tools: bool = True) -> ChatPrompt:
        options = {
            **self.chat_template_kwargs,
            "add_generation_prompt": self.add_generation_prompt is not False and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
        }
        offered = tuple(definition.tool() for definition in self.tools or []) if tools else ()
        return ChatPrompt(for_template(messages), options, offered)


class ChatBody(_TemplateSettings, _Generation):
    """/v1/chat/completions"""

    messages: Messages
    max_completion_tokens: WholeNumber | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Log probabilities of the output's tokens."""
    top_logprobs: WholeNumber | None = None
    """Also of this many likeliest tokens beside each; needs logprobs."""
    tool_choice: ToolChoice = None
    """`auto` (the default): the model decides; `none`: the prompt leaves the tools out; `required` or a function: the
    answer consists of calls, whose arguments fit the schema."""
    parallel_tool_calls: bool | None = None
    """False: an answer has at most one call."""
    include_reasoning: bool = True
    """False leaves the model's reasoning out of the response."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        return _refuse_unsupported(body, _UNSUPPORTED_CHAT)

    @model_validator(mode="after")
    def _check(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise wrong(f"top_logprobs is {self.top_logprobs}, which needs logprobs to be true", "top_logprobs")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise wrong(
                "max_tokens and max_completion_tokens differ, must be one or the other", "max_completion_tokens"
            )
        self._tool_use()
        return self

    def _tool_use(self) -> ToolUse | None:
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def prompt(self) -> ChatPrompt:
        use = self._tool_use()
        return self._prompt(self.messages, use is not None and use.offered)

    def options(self, timeout_seconds: float | None) -> GenerationOptions:
        older = self.max_completion_tokens is None
        return self._options(
            {} if older else {"max_tokens": "max_completion_tokens"},
            max_tokens=self.max_tokens if older else self.max_completion_tokens,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            timeout_seconds=timeout_seconds,
            as_message=True,
            tools=self._tool_use(),
        )


class TokenizeBody(_TemplateSettings):
    """/tokenize: of a text or of a conversation"""

    model: str | None = None
    prompt: PlainText | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    """Adds the tokens that the model expects around a text; templates add theirs themselves."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt or messages must be given, and only one of them", "prompt")
        for name in ("tools", "chat_template_kwargs", "continue_final_message"):
            if getattr(self, name) and self.messages is None:
                raise wrong(f"{name} is given, which needs messages", name)
        return self

    def prompt_given(self) -> TextPrompt | ChatPrompt:
        return TextPrompt(self.prompt or "") if self.messages is None else self._prompt(self.messages)


class DetokenizeBody(Body):
    """/detokenize"""

    model: str | None = None
    tokens: TokenIds
