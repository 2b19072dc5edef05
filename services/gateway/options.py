"""What a request asks for, in one form for both APIs.

Ranges are checked here and not by pydantic: limits come from the gateway's settings and the model, at run time.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from spool.scheduler.messages import MAX_PRIORITY, MIN_PRIORITY, PROPOSERS
from spool.scheduler.sampling import MAX_SEED, MAX_TOKEN_ID, SamplingParameters
from spool.services.gateway.answers.tools import Tool, ToolUse, check_tools
from spool.services.gateway.errors import invalid
from spool.services.gateway.settings import Limits, SamplingDefaults
from spool.services.gateway.structure import Structure

# Drawn seeds are reported in JSON, and not every JSON reader keeps integers of more than 53 bits exact.
_DRAWN_SEED_BITS = 53
_LONGEST_NAME = 64
_MIN_SEED = -(2**63)
# Of a stop string and of a bad word.
_MOST_CHARACTERS = 512
# Entries of lists, each of which costs something.
_MOST_ENTRIES = {
    "stop": (16, "strings"),
    "bad_words": (64, "strings"),
    "stop_token_ids": (256, "token ids"),
    "logit_bias": (1024, "entries"),
}

SAMPLING_FIELDS = {one.name for one in fields(SamplingParameters)} - {
    *("seed", "min_tokens", "end_token_ids", "grammar", "bad_words")
}
"""Fields of SamplingParameters that a request gives as they are."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation; `template_options` go to the model's chat template, as do the functions that it may call."""

    messages: tuple[Mapping[str, Any], ...]
    template_options: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()


Prompt = TextPrompt | TokenPrompt | ChatPrompt
ChatRole = Literal["system", "developer", "user", "assistant", "tool"]


def chat_message(role: str, content: str, **more: Any) -> dict[str, Any]:
    """A message as templates know it: newer clients say `developer` for `system`. Raises RequestError."""
    if role not in get_args(ChatRole):
        raise invalid(
            f"messages has the role {shown(role)}, must be one of {', '.join(get_args(ChatRole))}", "messages"
        )
    return {"role": "system" if role == "developer" else role, "content": content, **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How to continue each prompt. None means the server's default.

    Choice i of a prompt is sampled with `seed` + i. Neither a stop token nor a stop string ends the output among the
    first `min_tokens` tokens. `draft_length` 0 turns speculation off; only the `proposer` proposes, if one is given.
    Of one key's requests, those with the lower `priority` are handled earlier; only those with the same `cache_salt`
    ("": none) take over each other's KV.
    `structure` says what each choice must look like. With `as_message`, the
    answer is split into reasoning, content and calls of `tools`. `sampling` holds what the client gave of the fields of
    SamplingParameters that are named SAMPLING_FIELDS. None of the `bad_words` is in the output.
    `top_logprobs` and `prompt_logprobs` have the meaning of SequenceRequest.
    With `receipt`, each choice ends with one; None: as the server's settings say, where that is possible.
    `max_tokens` may be 0 where the request is about its prompt: with `echo` or `prompt_logprobs`.
    `names` maps a field to the client's name for it, where the two differ.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    seed: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    draft_length: int | None = None
    proposer: str | None = None
    priority: int = 0
    cache_salt: str = ""
    structure: Structure | None = None
    as_message: bool = False
    tools: ToolUse | None = None
    receipt: bool | None = None
    timeout_seconds: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def about_prompt(self) -> bool:
        return self.echo or self.prompt_logprobs is not None

    def first_seed(self) -> int:
        """The seed of choice 0. To negative seeds, which OpenAI's clients may give, 2**64 is added."""
        if self.seed is None:
            return secrets.randbits(_DRAWN_SEED_BITS)
        return self.seed % (MAX_SEED + 1)


def options_given(values: Mapping[str, Any], **more: Any) -> GenerationOptions:
    """From the fields of a request, of which others than options and SAMPLING_FIELDS are left out; `more` goes over
    them."""
    given = {one.name: values[one.name] for one in fields(GenerationOptions) if one.name in values}
    given |= {name: tuple(given[name]) for name in ("stop", "stop_token_ids", "bad_words") if name in given}
    sampling = {name: values[name] for name in SAMPLING_FIELDS & values.keys()}
    return GenerationOptions(**given | {"sampling": sampling} | more)


def check_counts(given: Mapping[str, Any]) -> None:
    """Of the fields of a request, before anything looks at their entries. Raises RequestError."""
    for name, (most, what) in _MOST_ENTRIES.items():
        values = given.get(name, ())
        if isinstance(values, Sized) and not isinstance(values, str) and len(values) > most:
            raise invalid(f"{name} has {len(values)} {what}, must have at most {most}", name)


def check_length(name: str, values: object, most: int) -> None:
    """Of a list of a request, before anything looks at its entries; other values pass. Raises RequestError."""
    if isinstance(values, Sequence) and not isinstance(values, str) and len(values) > most:
        raise invalid(f"{name} has {len(values)} entries, must have at most {most}", name)


def check_options(options: GenerationOptions, limits: Limits, vocabulary_size: int) -> None:
    """Raises RequestError that names field, value and limit. SamplingParameters checks the sampling values, and
    `check_counts` has checked the lengths of lists."""
    for name, value, minimum, maximum in (
        ("max_tokens", options.max_tokens, 0 if options.about_prompt else 1, limits.output_tokens),
        ("min_tokens", options.min_tokens, 0, None),
        ("n", options.n, 1, limits.sequences),
        ("top_logprobs", options.top_logprobs, 0, limits.top_logprobs),
        ("prompt_logprobs", options.prompt_logprobs, 0, limits.top_logprobs),
        ("draft_length", options.draft_length, 0, MAX_TOKEN_ID),
        ("seed", options.seed, _MIN_SEED, MAX_SEED),
        ("priority", options.priority, MIN_PRIORITY, MAX_PRIORITY),
    ):
        _check_range(options.names.get(name, name), value, minimum, maximum)
    if options.proposer is not None and options.proposer not in PROPOSERS:
        name, allowed = options.names.get("proposer", "proposer"), ", ".join(PROPOSERS)
        raise invalid(f"proposer is {shown(options.proposer)}, must be one of {allowed}", name)
    for name in ("stop", "bad_words"):
        _check_texts(name, getattr(options, name))
    check_token_ids("stop_token_ids", options.stop_token_ids, vocabulary_size)
    if options.tools is not None:
        check_tools(options.tools)
    logit_bias = options.sampling.get("logit_bias", {})
    for token in logit_bias:
        if not 0 <= token < vocabulary_size:
            limit = f"between 0 and {vocabulary_size - 1}"
            raise invalid(f"logit_bias names token id {token}, must be {limit}", "logit_bias")


def check_token_ids(name: str, tokens: Sequence[int], vocabulary_size: int) -> None:
    for index, token in enumerate(tokens):
        if not 0 <= token < vocabulary_size:
            raise invalid(
                f"{name}[{index}] is {shown(token)}, must be a token id between 0 and {vocabulary_size - 1}",
                name.split("[")[0],
            )


def sampling_parameters(
    options: GenerationOptions,
    defaults: SamplingDefaults,
    vocabulary_size: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParameters:
    """The parameters of choice 0; `with_seed_of` makes those of the others. `bad_words` are those of the options, as
    tokens. Raises RequestError."""
    values = defaults.model_dump() | dict(options.sampling)
    try:
        sampling = SamplingParameters.given(seed=options.first_seed(), bad_words=bad_words, **values)
    except ValueError as error:
        message = str(error)
        raise invalid(message, message.split()[0].split("[")[0]) from error
    # A top_k beyond the vocabulary keeps all tokens.
    return replace(sampling, top_k=min(sampling.top_k, vocabulary_size))


def with_seed_of(sampling: SamplingParameters, choice: int) -> SamplingParameters:
    return replace(sampling, seed=(sampling.seed + choice) % (MAX_SEED + 1))


def shown(value: object) -> str:
    """A value of a request as text for a message: short, and possible to encode."""
    text = repr(value)
    if len(text) > 80:
        text = f"{text[:60]}... ({len(text)} characters)"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def meant(name: str, known: Iterable[str]) -> str:
    """The end of a message that refuses `name`: which of the known names is like it, if one is."""
    # Long names would take long to compare.
    found = difflib.get_close_matches(name, sorted(known), 1) if len(name) <= _LONGEST_NAME else []
    return f", did you mean {found[0]}?" if found else ""


def _check_range(name: str, value: int | None, minimum: int, maximum: int | None) -> None:
    if value is None or (value >= minimum and (maximum is None or value <= maximum)):
        return
    limit = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
    raise invalid(f"{name} is {shown(value)}, must be {limit}", name)


def _check_texts(name: str, texts: Sequence[str]) -> None:
    for index, text in enumerate(texts):
        if not 1 <= len(text) <= _MOST_CHARACTERS:
            limit = f"must have between 1 and {_MOST_CHARACTERS}"
            raise invalid(f"{name}[{index}] has {len(text)} characters, {limit}", name)
