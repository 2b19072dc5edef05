"""What makes two tokenizers the same for speculation: their token-to-id tables."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer


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


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """None where the folder has none."""
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.is_file() else None


def read_vocabulary(folder: Path, embedding_rows: int) -> Vocabulary:
    """The vocabulary of the model in `folder`, whose embedding has `embedding_rows` rows, padding included."""
    tokenizer = read_tokenizer(folder)
    if tokenizer is None:
        return Vocabulary(b"", embedding_rows)
    table = tokenizer.get_vocab(with_added_tokens=True)
    return Vocabulary(vocabulary_digest(table), min(vocabulary_size(table), embedding_rows))
