"""What makes two tokenizers the same for speculation: their token-to-id tables."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


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
