"""A model folder's tokenizer, and what makes two tokenizers the same for speculation: their token-to-id tables."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from spool.engine.errors import TokenizerError

_OTHER_FORMS = ("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Classes of transformers that read add_prefix_space of tokenizer_config.json.
_REBUILT = ("GPT2Tokenizer", "Qwen2Tokenizer", "RobertaTokenizer")


def vocabulary_digest(table: Mapping[str, int]) -> bytes:
    """SHA-256 over the sorted (token, id) pairs; equal tables have equal digests, whatever wrote them down."""
    digest = hashlib.sha256()
    for token, token_id in sorted(table.items()):
        encoded = token.encode("utf-8", errors="surrogatepass")
        # The length in front keeps two tokens from reading like one.
        digest.update(f"{len(encoded)} {token_id} ".encode())
        digest.update(encoded)
    return digest.digest()


def vocabulary_size(table: Mapping[str, int]) -> int:
    """Token ids lie in [0, size); holes in the table count, padded embedding rows behind it do not."""
    return max(table.values(), default=-1) + 1


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids of a model folder. `digest` is empty where the folder has no tokenizer to take it of."""

    digest: bytes
    size: int


def read_json(path: Path) -> dict[str, Any]:
    """Empty where the file is missing. Raises TokenizerError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} holds a JSON {type(content).__name__}, must be an object")
    return content


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """What tokenizer_config.json says, and where it has no `added_tokens_decoder` the two older files, as in
    transformers. Raises TokenizerError."""
    settings = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings.update(read_json(folder / "special_tokens_map.json"))
        added = read_json(folder / "added_tokens.json")
        special = {token.content for token in _special_tokens(settings)}
        settings["added_tokens_decoder"] = {
            number: {"content": text, "special": text in special, "normalized": text not in special}
            for text, number in added.items()
        }
    return settings


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str | None]:
    """The special tokens that have a name (`bos_token`, ...); None for those that the model says it has not."""
    extra = settings.get("extra_special_tokens")
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    found = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: value for name, value in found.items() if value is None or isinstance(value, str)}


def no_tokenizer(folder: Path) -> str:
    name = repr(str(folder))
    program = f"from transformers import AutoTokenizer as A; A.from_pretrained({name}).save_pretrained({name})"
    return f"{folder} holds no tokenizer.json; where transformers reads its tokenizer, this makes one: {program}"


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """None where the folder has none in any form. With the tokens that only the settings name, as in transformers;
    raises TokenizerError, also for a tokenizer in another form than tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        if any(found for form in _OTHER_FORMS for found in folder.glob(form)):
            raise TokenizerError(no_tokenizer(folder))
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise TokenizerError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    settings = tokenizer_settings(folder)
    if settings.get("split_special_tokens"):
        raise TokenizerError(f"{folder.name}/tokenizer_config.json has split_special_tokens, which is not supported")
    _check_prefix_space(folder, settings)
    own = tokenizer.get_added_tokens_decoder()
    numbered = {
        int(number): _added_token(token, special=False) for number, token in settings["added_tokens_decoder"].items()
    }
    # What tokenizer_config.json says of a token counts, and older files only add to tokenizer.json.
    if "added_tokens_decoder" not in read_json(folder / "tokenizer_config.json"):
        known = {token.content for token in own.values()}
        numbered = {number: token for number, token in numbered.items() if token.content not in known} | own
    added = [token for _, token in sorted(numbered.items(), key=lambda entry: entry[0])]
    special = _special_tokens(settings)
    named = {token.content for token in special}
    for token in added:
        token.special = token.special or token.content in named
    known = {token.content for token in (*own.values(), *added)}
    added += [token for token in special if token.content not in known]
    tokenizer.add_tokens(added)
    return tokenizer


def _check_prefix_space(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raises TokenizerError where tokenizer_config.json says otherwise than tokenizer.json whether a text begins with a
    space, for the classes in which transformers goes by the former."""
    stated = settings.get("add_prefix_space")
    if stated is None or str(settings.get("tokenizer_class")).removesuffix("Fast") not in _REBUILT:
        return
    step = read_json(folder / "tokenizer.json").get("pre_tokenizer") or {}
    steps = [one for one in (step, *step.get("pretokenizers", ())) if one.get("type") == "ByteLevel"]
    if any(one["add_prefix_space"] != stated for one in steps):
        raise TokenizerError(
            f"{folder.name}/tokenizer_config.json has add_prefix_space {stated}, and tokenizer.json {not stated}: must "
            "be the same"
        )


def _special_tokens(settings: Mapping[str, Any]) -> list[AddedToken]:
    extra = settings.get("extra_special_tokens", settings.get("additional_special_tokens")) or ()
    entries = [settings.get(name) for name in _NAMED] + list(extra.values() if isinstance(extra, dict) else extra)
    return [_added_token(entry) for entry in entries if entry]


def _added_token(entry: object, special: bool = True) -> AddedToken:
    """`special`: of an object that does not say."""
    if isinstance(entry, str):
        return AddedToken(entry, special=True)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
        raise TokenizerError(f"a special token of the tokenizer is {entry!r}, must be a text or an object with content")
    flags = {name: bool(entry[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
    return AddedToken(entry["content"], special=entry.get("special", special), **flags)


def vocabulary_of(tokenizer: Tokenizer | None, folder: Path, embedding_rows: int) -> Vocabulary:
    """The vocabulary of the model in `folder`, whose embedding has `embedding_rows` rows, padding included.

    Raises TokenizerError for a tokenizer of another model, as far as can be told. Added tokens may lie beyond the
    embedding: some published models name a padding token that they have no row for.
    """
    if tokenizer is None:
        return Vocabulary(b"", embedding_rows)
    own = vocabulary_size(tokenizer.get_vocab(with_added_tokens=False))
    if own > embedding_rows:
        raise TokenizerError(
            f"{folder.name}/tokenizer.json has {own} tokens, must have at most {embedding_rows}, the rows of the "
            "model's embedding: it is of another model"
        )
    table = tokenizer.get_vocab(with_added_tokens=True)
    return Vocabulary(vocabulary_digest(table), min(vocabulary_size(table), embedding_rows))
