"""API keys: who may call, under which name, and whose KV a request may take over."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from pydantic import SecretStr

from spool.services.gateway.errors import ErrorKind, RequestError
from spool.services.gateway.settings import NamedKey
from spool.services.observability.request_ids import current_key_digest

_SCHEME = b"bearer "
_BASIC = b"basic "


class ApiKeys:
    """Compares the key that a client shows with every known key, in a time that reveals nothing about the keys."""

    def __init__(
        self, keys: Sequence[SecretStr], named: Sequence[NamedKey] = (), metrics: Sequence[SecretStr] = ()
    ) -> None:
        # Digests all have the same length, and comparing digests does not reveal how much of a key was right.
        self._digests = [(_digest(key.get_secret_value().encode()), "") for key in keys]
        self._digests += [(bytes.fromhex(key.digest), key.name) for key in named]
        self._of_metrics = [_digest(key.get_secret_value().encode()) for key in metrics]

    def check(self, *authorization: bytes, reads_metrics: bool = False) -> tuple[str, bytes]:
        """The name ("" for one without a name) and the digest of the key that is shown; both empty where none is set.

        `authorization` is what the header or the metadata has. Raises RequestError unless one known key is shown,
        which may be one of the metrics' where the request `reads_metrics` and does nothing else.
        """
        if not self._digests:
            return "", b""
        if not authorization:
            raise _refusal("no API key was given: send `authorization: Bearer <key>`", "missing_api_key")
        given, *others = authorization
        if others:
            raise _refusal(f"authorization was given {1 + len(others)} times, must be given once", "invalid_api_key")
        if given[: len(_SCHEME)].lower() != _SCHEME:
            raise _refusal("authorization must have the form `Bearer <key>`", "invalid_api_key")
        shown = _digest(given[len(_SCHEME) :].strip())
        found = None
        for digest, name in self._digests:
            # All are compared, wherever the right one stands.
            found = (name, digest) if hmac.compare_digest(digest, shown) else found
        of_metrics = [digest for digest in self._of_metrics if hmac.compare_digest(digest, shown)]
        if found is None and of_metrics:
            if not reads_metrics:
                message = "the API key may read /metrics and /load alone"
                raise RequestError(ErrorKind.FORBIDDEN, message, code="metrics_key")
            found = ("", shown)
        if found is None:
            raise _refusal("the API key is not known here", "invalid_api_key")
        return found


def cache_scope(salt: str, shared: bool) -> bytes:
    """Only requests of the same scope take over each other's KV: those with this `salt` ("": none) and, unless KV is
    `shared` between keys, with the current request's key. Without key and salt it is empty, else 32 bytes."""
    key = b"" if shared else current_key_digest()
    return hashlib.blake2b(salt.encode(), key=key, digest_size=32).digest() if key or salt else b""


def bearer_of_basic(authorization: bytes) -> bytes:
    """Turns the password of HTTP's basic scheme, which browsers ask people for, into a bearer's key.

    Returns any other value unchanged.
    """
    if authorization[: len(_BASIC)].lower() != _BASIC:
        return authorization
    try:
        shown = base64.b64decode(authorization[len(_BASIC) :].strip(), validate=True)
    except binascii.Error:
        return authorization
    return _SCHEME + shown.partition(b":")[2]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(message: str, code: str) -> RequestError:
    return RequestError(ErrorKind.UNAUTHENTICATED, message, code=code)
