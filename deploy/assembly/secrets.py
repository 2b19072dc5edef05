"""Secrets that a configuration names, read where they are needed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificates

from deploy.config.ingress import InternalSettings
from services.gateway.settings import TlsFiles
from services.rpc.channel_security import ChannelSecurity


class SecretError(ValueError):
    """A secret that the configuration names is not there or cannot be used; the message says which."""


def channel_security(settings: InternalSettings) -> ChannelSecurity:
    """Reads the secrets that the settings name, on the node where they are needed. Raises SecretError."""
    token, field = "", "token"
    if settings.token is not None:
        token = settings.token.get_secret_value()
    elif settings.token_env is not None:
        field, token = "token_env", secret_from_environment("internal.token_env", settings.token_env)
    elif settings.token_file is not None:
        field, token = "token_file", secret_from_file("internal.token_file", settings.token_file)
    try:
        security = ChannelSecurity(token=token)
    except ValueError as error:
        raise SecretError(f"internal.{field} names a token that cannot be used: {error}") from error
    if settings.tls is None:
        return security
    tls = settings.tls
    check_pem("internal.tls", tls)
    return ChannelSecurity(
        token=token,
        ca_file=str(tls.ca),
        certificate_file=str(tls.certificate),
        key_file=str(tls.key),
        server_name=tls.server_name or "",
    )


def secret_from_environment(field: str, name: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise SecretError(f"{field} is {name}, and the environment has no such variable")
    return value


def check_keys(field: str, keys: Iterable[str]) -> None:
    """Raises SecretError unless clients can send each of the API keys that the field names."""
    if not all("!" <= letter <= "~" for key in keys for letter in key):
        raise SecretError(f"{field} names a key with characters other than printable ASCII")


def check_pem(field: str, tls: TlsFiles) -> None:
    """Raises SecretError, naming the field, unless each file of the section `field` is what it must be."""
    for name, file in tls:
        if not isinstance(file, Path):
            continue
        pem = secret_from_file(f"{field}.{name}", file).encode()
        try:
            if name == "key":
                load_pem_private_key(pem, password=None)
            else:
                load_pem_x509_certificates(pem)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            kind = "private key without a password" if name == "key" else "certificate"
            raise SecretError(f"{field}.{name} is {file}, must be a {kind} in PEM: {error}") from error


def secret_from_file(field: str, path: Path) -> str:
    try:
        value = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SecretError(f"{field} is {path}, which cannot be read: {error}") from error
    if not value:
        raise SecretError(f"{field} is {path}, which is empty")
    return value
