"""What can be sent as `Bearer <key>`, in a header of HTTP and in metadata of gRPC."""

from __future__ import annotations

import re

KEY_FORM = "must be printable ASCII without spaces, at least one character"

_KEY = re.compile(r"[!-~]+")


def is_key(text: str) -> bool:
    """Whether an API key or a token has the form that `KEY_FORM` says."""
    return _KEY.fullmatch(text) is not None
