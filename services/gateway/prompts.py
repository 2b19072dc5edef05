"""Turns the prompts of a request into tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spool.protos.scheduler_pb2 import ServedModel
from spool.services.gateway.answers.reasoning import Reasoning, reasoning_after
from spool.services.gateway.errors import invalid
from spool.services.gateway.options import (
    ChatPrompt,
    GenerationOptions,
    Prompt,
    TextPrompt,
    TokenPrompt,
    check_token_ids,
    meant,
    shown,
)
from spool.services.gateway.settings import GatewaySettings
from spool.services.gateway.token_strings import TokenStrings
from spool.services.text.chat_template import ChatTemplateError
from spool.services.text.incremental_decoder import whole_text
from spool.services.text.tokenizer import ModelTokenizer

MOST_PROMPT_LOGPROBS = 200_000
"""Of each prompt: its tokens times one more than the likeliest ones reported for each."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """`text` is the prompt to echo, None unless the client asked for an echo; `offsets` say where in it the tokens
    begin. `reasoning`: how the answer of a model that reasons begins. The last `begun` tokens
    have the first bytes of a character, with which the output begins: `text` ends before it."""

    tokens: tuple[int, ...]
    text: str | None
    reasoning: Reasoning = Reasoning.POSSIBLE
    offsets: tuple[int, ...] = ()
    begun: int = 0


@dataclass(frozen=True, slots=True)
class _Room:
    """For a prompt and `max_tokens` of output."""

    name: str
    max_tokens: int
    limit: int

    def check(self, tokens: int, how_many: str = "") -> None:
        """Raises RequestError."""
        if (total := tokens + self.max_tokens) > self.limit:
            more = f", which with max_tokens of {self.max_tokens} makes {total}" if self.max_tokens else ""
            message = f"{self.name} has {how_many}{tokens} tokens{more}; the model's limit is {self.limit}"
            raise invalid(message, self.name.split("[")[0], "context_length_exceeded")


def prepare_prompts(
    prompts: Sequence[Prompt],
    tokenizer: ModelTokenizer,
    model: ServedModel,
    settings: GatewaySettings,
    options: GenerationOptions,
) -> list[PreparedPrompt]:
    """Takes long for a long text. Raises RequestError, or ChatTemplateError for messages that the model's template does
    not accept."""
    max_tokens, limit = 1 if options.max_tokens is None else options.max_tokens, model.max_sequence_length
    if not prompts:
        raise invalid("prompt is empty, must hold at least 1 prompt", "prompt")
    prepared = []
    for index, prompt in enumerate(prompts):
        name = "messages" if isinstance(prompt, ChatPrompt) else "prompt" if len(prompts) == 1 else f"prompt[{index}]"
        room = _Room(name, max_tokens, limit)
        if isinstance(prompt, TokenPrompt):
            room.check(len(prompt.tokens))
            check_token_ids(name, prompt.tokens, model.vocabulary_size)
        one = _prepare(prompt, tokenizer, settings, options, room)
        if not one.tokens:
            raise invalid(f"{name} is empty, must have at least 1 token", name.split("[")[0])
        room.check(len(one.tokens))
        if max(one.tokens) >= model.vocabulary_size:
            token = next(token for token in one.tokens if token >= model.vocabulary_size)
            text = f"{shown(tokenizer.token_text(token))}, which is token {token}"
            message = f"{name} holds {text}: the model's weights end with token {model.vocabulary_size - 1}"
            raise invalid(message, name.split("[")[0])
        if options.prompt_logprobs is not None:
            count, most = len(one.tokens) * (1 + options.prompt_logprobs), MOST_PROMPT_LOGPROBS
            if count > most:
                field = options.names.get("prompt_logprobs", "prompt_logprobs")
                asked = f"is {options.prompt_logprobs} for {len(one.tokens)} tokens"
                raise invalid(f"{field} {asked}, which makes {count} log probabilities, must be at most {most}", field)
        prepared.append(one)
    return prepared


def encode_chat(
    prompt: ChatPrompt,
    tokenizer: ModelTokenizer,
    settings: GatewaySettings,
    check_length: Callable[[str], None] = lambda text: None,
) -> tuple[list[int], str]:
    """The tokens and the text. Raises RequestError or ChatTemplateError."""
    most = settings.limits.messages
    if not 1 <= len(prompt.messages) <= most:
        raise invalid(f"messages has {len(prompt.messages)} entries, must have between 1 and {most}", "messages")
    options = dict(prompt.template_options)
    if prompt.tools:
        if not tokenizer.chat_template(with_tools=True).takes_tools:
            raise invalid("tools is given, which the model's chat template has no place for", "tools")
        options["tools"] = [tool.for_template() for tool in prompt.tools]
    read = tokenizer.chat_template(bool(prompt.tools)).options
    for name in prompt.template_options.keys() - read - {"add_generation_prompt", "continue_final_message"}:
        message = f"chat_template_kwargs has {name}, which the model's chat template does not read"
        raise invalid(f"{message}{meant(name, read)}", "chat_template_kwargs")
    options["strftime_now"] = settings.strftime_now
    try:
        return tokenizer.prepare_chat(prompt.messages, check_length=check_length, **options)
    except ChatTemplateError as error:
        counts = [len(message.get("tool_calls") or ()) for message in prompt.messages]
        if max(counts) < 2 or tokenizer.chat_template(bool(prompt.tools)).takes_several_calls:
            raise
        field = f"messages.{next(place for place, count in enumerate(counts) if count > 1)}.tool_calls"
        raise invalid(f"{field} has {max(counts)} calls, must have one: {error}", field) from error


def encode_alone(
    prompt: TextPrompt | ChatPrompt,
    tokenizer: ModelTokenizer,
    settings: GatewaySettings,
    limit: int,
    add_special_tokens: bool,
) -> list[int]:
    """The tokens of a prompt that nothing continues, at most `limit`. Takes long for a long text. Raises RequestError
    or ChatTemplateError."""
    room = _Room("messages" if isinstance(prompt, ChatPrompt) else "prompt", 0, limit)

    def check_length(text: str) -> None:
        room.check(tokenizer.least_tokens(len(text)), "at least ")

    if isinstance(prompt, ChatPrompt):
        tokens = encode_chat(prompt, tokenizer, settings, check_length)[0]
    else:
        check_length(prompt.text)
        tokens = tokenizer.encode(prompt.text, add_special_tokens)
    room.check(len(tokens))
    return tokens


def bad_word_tokens(words: Sequence[str], tokenizer: ModelTokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word at the beginning of a text and, where they are as many and others, after a space; vLLM
    takes the same."""
    found: list[tuple[int, ...]] = []
    for word in words:
        text = word.lstrip()
        bare, spaced = tuple(tokenizer.encode(text, False)), tuple(tokenizer.encode(f" {text}", False))
        if not bare:
            raise invalid(f"bad_words holds {shown(word)}, which makes no token", "bad_words")
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return tuple(found)


def _prepare(
    prompt: Prompt, tokenizer: ModelTokenizer, settings: GatewaySettings, options: GenerationOptions, room: _Room
) -> PreparedPrompt:
    def check_length(text: str) -> None:
        """Encoding takes long."""
        room.check(tokenizer.least_tokens(len(text)), "at least ")

    match prompt:
        case TextPrompt():
            check_length(prompt.text)
            if not options.echo:
                return PreparedPrompt(tuple(tokenizer.encode(prompt.text)), None)
            encoded, starts = tokenizer.encode_with_offsets(prompt.text)
            return PreparedPrompt(tuple(encoded), prompt.text, offsets=tuple(starts))
        case TokenPrompt():
            skips = options.skip_special_tokens
            begun = TokenStrings(tokenizer).begun_character(prompt.tokens, skips)
            if not options.echo:
                return PreparedPrompt(prompt.tokens, None, begun=begun)
            text = whole_text(lambda tokens: tokenizer.decode(tokens, skips), prompt.tokens, begun)
            decoder, offsets, end = tokenizer.decoder(skip_special_tokens=skips), [], 0
            for token in prompt.tokens:
                offsets.append(min(end + decoder.held_characters, len(text)))
                end += len(decoder.push((token,)))
            return PreparedPrompt(prompt.tokens, text, offsets=tuple(offsets), begun=begun)
        case ChatPrompt():
            tokens, rendered = encode_chat(prompt, tokenizer, settings, check_length)
            continued = bool(prompt.template_options.get("continue_final_message"))
            written = prompt.messages[-1]["content"] if continued else ""
            return PreparedPrompt(tuple(tokens), None, reasoning_after(rendered, written))
