"""Text to tokens and back for a model folder, without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from spool.engine.errors import TokenizerError
from spool.engine.models.vocabulary import (
    named_tokens,
    no_tokenizer,
    read_json,
    read_tokenizer,
    tokenizer_settings,
    vocabulary_digest,
    vocabulary_size,
)
from spool.services.text.added_tokens import changed, with_added_tokens
from spool.services.text.chat_template import ChatTemplate, ChatTemplateError
from spool.services.text.incremental_decoder import IncrementalDecoder
from spool.services.text.plain_specials import PlainSpecials
from spool.services.text.token_lengths import most_characters_per_token

# Of several named templates, the others are for special uses.
_DEFAULT_TEMPLATE, _TOOL_TEMPLATE = "default", "tool_use"


class ModelTokenizer:
    """The tokenizer of one model: encoding, decoding, the chat template, and the tokens that end an answer.

    Safe to use from several threads. Raises TokenizerError.
    """

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        """`chat_template` takes the place of the folder's own."""
        self.folder = folder
        tokenizer = read_tokenizer(folder)
        if tokenizer is None:
            raise TokenizerError(no_tokenizer(folder))
        self._tokenizer = tokenizer
        # Some files set these for training; prompts are neither truncated nor padded.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = tokenizer_settings(folder)
        table = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary_size = vocabulary_size(table)
        self.vocabulary_digest = vocabulary_digest(table)
        self.special_tokens = named_tokens(settings)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special_texts = frozenset(token.content for token in added if token.special)
        """The texts of the tokens that decoding skips."""
        self.stop_token_ids = self._stop_token_ids(folder)
        own = _chat_template_sources(folder, settings)
        self._chat_sources = own if chat_template is None else {_DEFAULT_TEMPLATE: chat_template}
        self._chat_templates: dict[str, ChatTemplate] = {}
        self._showing: dict[frozenset[str], tokenizers.Tokenizer] = {}
        self._plain = PlainSpecials(self._tokenizer, self.special_texts)
        self._characters_per_token = most_characters_per_token(self._tokenizer, table)

    @property
    def reads_clock(self) -> bool:
        """Whether a chat template asks for the date, so that the prompt of a conversation is another one tomorrow."""
        return any("strftime_now" in source for source in self._chat_sources.values())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens` adds the tokens that the model expects around a text, such as one for its beginning."""
        # Of the library's methods, only those for several texts free the interpreter's lock.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """As `encode`, and where in the text each token begins; a token that was added begins where the next one
        does."""
        [encoding] = self._tokenizer.encode_batch([text])
        starts: list[int] = []
        next_start = len(text)
        for (start, _), special in zip(reversed(encoding.offsets), reversed(encoding.special_tokens_mask), strict=True):
            next_start = next_start if special else start
            starts.append(next_start)
        return encoding.ids, starts[::-1]

    def least_tokens(self, characters: int) -> int:
        """How many tokens a text of so many characters has for certain; 0 where no number is certain."""
        return -(-characters // self._characters_per_token) if self._characters_per_token else 0

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)[0]
        return text

    def decoder(
        self,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: frozenset[str] = frozenset(),
        begun: int = 0,
    ) -> IncrementalDecoder:
        """A decoder of tokens that come one after the other; `context` and `begun` as in IncrementalDecoder. The
        special tokens among `shown` are never skipped. They need a tokenizer of their own."""
        hidden = shown & self.special_texts if skip_special_tokens else frozenset()
        return IncrementalDecoder(self._tokenizer_showing(hidden), context, skip_special_tokens, begun)

    def chat_template(self, with_tools: bool = False) -> ChatTemplate:
        """Some models have a template of its own for chats with tools. Raises ChatTemplateError."""
        if not self._chat_sources:
            raise ChatTemplateError("the model has no chat template, it only continues text")
        name = _TOOL_TEMPLATE if with_tools and _TOOL_TEMPLATE in self._chat_sources else _DEFAULT_TEMPLATE
        if name not in self._chat_templates:
            self._chat_templates[name] = ChatTemplate(self._chat_sources[name], self.special_tokens)
        return self._chat_templates[name]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """The text of a conversation; options as in ChatTemplate.render. Raises ChatTemplateError."""
        return self.chat_template(bool(options.get("tools"))).render(messages, **options)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> list[int]:
        """The prompt of a conversation; options as in `prepare_chat`."""
        return self.prepare_chat(messages, **options)[0]

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        check_length: Callable[[str], None] = lambda text: None,
        **options: Any,
    ) -> tuple[list[int], str]:
        """The prompt of a conversation, and its text: the template writes the special tokens itself.

        The text of a special token in a message or a tool is text and not that token.
        `check_length` sees the text before it is encoded.
        """
        given = [
            {name: text if name == "role" else self._plain.marked(text) for name, text in one.items()}
            for one in messages
        ]
        tools = self._plain.marked(options.get("tools"))
        if given == list(messages) and tools == options.get("tools"):
            text = self.render_chat(messages, **options)
            check_length(text)
            return self.encode(text, add_special_tokens=False), text
        marked = self.render_chat(given, **{**options, "tools": tools})
        text = self._plain.unmarked(marked)
        check_length(text)
        return self._plain.encode(marked), text

    def token_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_text(self, token_id: int) -> str | None:
        found: str | None = self._tokenizer.id_to_token(token_id)
        return found

    def _tokenizer_showing(self, texts: frozenset[str]) -> tokenizers.Tokenizer:
        if not texts:
            return self._tokenizer
        if texts not in self._showing:

            def showing(token: AddedToken) -> AddedToken:
                return changed(token, token.content, token.special and token.content not in texts)

            shared, ids = with_added_tokens(self._tokenizer, showing)
            if ids != {number: number for number in self._tokenizer.get_added_tokens_decoder()}:
                # The ids of its added tokens have gaps.
                description = json.loads(self._tokenizer.to_str())
                for token in description["added_tokens"]:
                    token["special"] = token["special"] and token["content"] not in texts
                shared = tokenizers.Tokenizer.from_str(json.dumps(description))
            self._showing[texts] = shared
        return self._showing[texts]

    def _stop_token_ids(self, folder: Path) -> frozenset[int]:
        """The end tokens named by the generation settings, or else by the model's, and by the tokenizer's settings."""
        stops: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            found = read_json(folder / name).get("eos_token_id")
            if found is not None:
                stops.update(found if isinstance(found, list) else [found])
                break
        eos = self.special_tokens.get("eos_token")
        eos_id = None if eos is None else self._tokenizer.token_to_id(eos)
        if eos_id is not None:
            stops.add(eos_id)
        wrong = [stop for stop in stops if not isinstance(stop, int) or stop < 0]
        if wrong:
            raise TokenizerError(f"{folder}: eos_token_id holds {wrong[0]!r}, must be token ids")
        return frozenset(stops)


def _chat_template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name; none where there is no default one."""
    sources: dict[str, str] = {}
    template = config.get("chat_template")
    if isinstance(template, str):
        sources[_DEFAULT_TEMPLATE] = template
    elif isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        sources = {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
    for name, file in (
        (_DEFAULT_TEMPLATE, folder / "chat_template.jinja"),
        (_TOOL_TEMPLATE, folder / "additional_chat_templates" / f"{_TOOL_TEMPLATE}.jinja"),
    ):
        if file.is_file():
            sources[name] = file.read_text(encoding="utf-8")
    return sources if _DEFAULT_TEMPLATE in sources else {}
