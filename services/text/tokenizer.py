"""Text to tokens and back for a model folder, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from engine.models.vocabulary import vocabulary_digest, vocabulary_size
from services.text.chat_template import ChatTemplate, ChatTemplateError
from services.text.incremental_decoder import IncrementalDecoder

# The files that are fetched of a model on the hub: no weights.
_HUB_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "*.jinja")


class TokenizerError(ValueError):
    """The folder holds no usable tokenizer; the message names the file."""


class ModelTokenizer:
    """The tokenizer of one model: encoding, decoding, the chat template, and the tokens that end an answer.

    Safe to use from several threads. Raises TokenizerError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{folder} holds no tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise TokenizerError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
        # Some files set these for training; prompts are neither truncated nor padded.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = _read_json(folder / "tokenizer_config.json")
        table = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary_size = vocabulary_size(table)
        self.vocabulary_digest = vocabulary_digest(table)
        self.special_tokens = _special_tokens(self._config)
        self.stop_token_ids = self._stop_token_ids(folder)
        self._chat_source = _chat_template_source(folder, self._config)
        self._chat_template: ChatTemplate | None = None

    @property
    def has_chat_template(self) -> bool:
        return self._chat_source is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens` adds the tokens that the model expects around a text, such as one for its beginning."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def decoder(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder of tokens that come one after the other; `context` holds the tokens before the first one."""
        return IncrementalDecoder(self._tokenizer, context, skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of a conversation; options as in ChatTemplate.render. Raises ChatTemplateError."""
        if self._chat_template is None:
            if self._chat_source is None:
                raise ChatTemplateError("the model has no chat template, it only continues text")
            self._chat_template = ChatTemplate(self._chat_source, self.special_tokens)
        return self._chat_template.render(messages, **options)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The prompt of a conversation: the template writes the special tokens itself."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_text(self, token_id: int) -> str | None:
        found: str | None = self._tokenizer.id_to_token(token_id)
        return found

    def _stop_token_ids(self, folder: Path) -> frozenset[int]:
        """The end tokens named by the generation settings, or else by the model's, and by the tokenizer's settings."""
        stops: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            found = _read_json(folder / name).get("eos_token_id")
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


def load_tokenizer(model: str) -> ModelTokenizer:
    """The tokenizer of a model folder, or of a model on the hub; only the tokenizer's files are fetched from there.

    Raises TokenizerError.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return ModelTokenizer(folder)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return ModelTokenizer(Path(snapshot_download(model, allow_patterns=list(_HUB_FILES))))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise TokenizerError(f"{model}: no such folder, and the hub did not give it: {reason}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _chat_template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        # Of several named templates, the others are for special uses.
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} holds a JSON {type(content).__name__}, must be an object")
    return content
