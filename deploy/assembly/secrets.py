"""Secrets that a configuration names, read where they are needed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificates

from spool.deploy.config.ingress import InternalSettings
from spool.deploy.config.spool_config import SpoolConfig
from spool.scheduler.errors import SpoolError
from spool.services.gateway.settings import TlsFiles
from spool.services.receipts.signing import ReceiptKey
from spool.services.rpc.bearer import KEY_FORM, is_key
from spool.services.rpc.channel_security import ChannelSecurity


class SecretError(SpoolError, ValueError):
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
    value = os.environ.get(name)
    if value is None:
        raise SecretError(f"{field} is {name}, and the environment has no such variable")
    if not value.strip():
        raise SecretError(f"{field} is {name}, a variable that is empty")
    return value.strip()


@dataclass(frozen=True, slots=True)
class ClientSecrets:
    """What a gateway needs in order to serve clients, beside what stands in its configuration."""

    api_keys: tuple[str, ...]
    metrics_keys: tuple[str, ...]
    receipt_key: str | None


def client_secrets(config: SpoolConfig) -> ClientSecrets:
    """Reads the keys without a name, from wherever the configuration says, and the key for receipts; checks the
    certificate. Raises SecretError for what cannot be used, and for a source of keys that holds none."""
    if config.auth.tls is not None:
        check_pem("auth.tls", config.auth.tls)
    auth = config.auth
    written = [key.get_secret_value() for key in auth.api_keys]
    api_keys = [*written, *_keys("auth.api_keys", auth.api_keys_env, auth.api_keys_file)]
    metrics_keys = _keys("auth.metrics_keys", auth.metrics_keys_env, auth.metrics_keys_file)
    return ClientSecrets(tuple(api_keys), tuple(metrics_keys), _receipt_key(config.gateway.receipt_key_file))


def _keys(field: str, name: str | None, file: Path | None) -> list[str]:
    """Those of the environment variable and of the file, which two fields name, each beginning with `field`."""
    keys: list[str] = []
    if name is not None:
        keys += _usable(f"{field}_env", name, secret_from_environment(f"{field}_env", name).split(","))
    if file is not None:
        keys += _usable(f"{field}_file", file, secret_from_file(f"{field}_file", file).splitlines())
    return keys


def _usable(field: str, source: object, parts: list[str]) -> list[str]:
    """The keys among the parts of a source. A server that was to ask for keys, and found none, would be open."""
    keys = [key for part in parts if (key := part.strip())]
    if not keys:
        raise SecretError(f"{field} is {source}, which holds no key, must hold at least one")
    for number, key in enumerate(keys, 1):
        if not is_key(key):
            raise SecretError(f"{field} is {source}, whose key {number} {KEY_FORM}")
    return keys


def _receipt_key(file: Path | None) -> str | None:
    if file is None:
        return None
    pem = secret_from_file("gateway.receipt_key_file", file)
    try:
        ReceiptKey(pem)
    except ValueError as error:
        raise SecretError(f"gateway.receipt_key_file is {file}: {error}") from error
    return pem


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
