"""Clients of HTTP share what they know of authorities: httpx reads a file of hundreds for each, also for plain HTTP."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any


@functools.cache
def share_authorities() -> None:
    """For good, in this process."""
    transports: Any = importlib.import_module("httpx._transports.default")
    create = transports.create_ssl_context

    @functools.cache
    def usual(*_: str | None) -> Any:
        return create()

    def context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> Any:
        if verify is not True or cert is not None or not trust_env:
            return create(verify=verify, cert=cert, trust_env=trust_env)
        return usual(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))

    transports.create_ssl_context = context
