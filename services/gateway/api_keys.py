"""Who may call."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from pydantic import SecretStr

from services.gateway.errors import ErrorKind, RequestError

_SCHEME = b"bearer "
_BASIC = b"basic "


class ApiKeys:
    """Compares what a client shows with every key, in a time that tells nothing about them."""

    def __init__(self, keys: Sequence[SecretStr]) -> None:
        # Digests have one length, and a comparison of them stops nowhere that a key could be guessed from.
        self._digests = [_digest(key.get_secret_value().encode()) for key in keys]

    def check(self, authorization: bytes | None) -> None:
        """`authorization` is the header's or the metadata's value. Raises RequestError; not where there are no keys."""
        if not self._digests:
            return
        if authorization is None:
            raise _refusal("no API key was given: send `authorization: Bearer <key>`", "missing_api_key")
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise _refusal("authorization must have the form `Bearer <key>`", "invalid_api_key")
        shown = _digest(authorization[len(_SCHEME) :].strip())
        known = False
        for digest in self._digests:
            known |= hmac.compare_digest(digest, shown)
        if not known:
            raise _refusal("the API key is not known here", "invalid_api_key")


def bearer_of_basic(authorization: bytes | None) -> bytes | None:
    """The password of HTTP's basic scheme as a bearer's key: browsers ask people for that. Anything else as it is."""
    if authorization is None or authorization[: len(_BASIC)].lower() != _BASIC:
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
