"""API keys: who may call."""

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
    """Compares the key that a client shows with every known key, in a time that reveals nothing about the keys."""

    def __init__(self, keys: Sequence[SecretStr]) -> None:
        # Digests all have the same length, and comparing digests does not reveal how much of a key was right.
        self._digests = [_digest(key.get_secret_value().encode()) for key in keys]

    def check(self, authorization: bytes | None) -> None:
        """Raises RequestError unless a known key is shown, or none is set.

        `authorization` is the value of the header or the metadata.
        """
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
    """Turns the password of HTTP's basic scheme, which browsers ask people for, into a bearer's key.

    Returns any other value unchanged.
    """
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
