"""Certificates that are renewed while a server uses them."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Generic, TypeVar

import grpc
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509 import load_pem_x509_certificates

from spool.scheduler.errors import SpoolError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CertificateError(SpoolError, OSError):
    """Files that hold no certificate and its key."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: a certificate with the intermediate ones, its private key, and the authority of clients, if any."""

    certificate: Path
    key: Path
    authority: Path | None = None

    def state(self) -> Sequence[tuple[int, int, int] | None]:
        """Another one after any change of the files, also where each is a link to another file then."""
        return [_state(path) for path in (self.certificate, self.key, self.authority) if path is not None]

    def grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Raises OSError."""
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        roots = None if self.authority is None else self.authority.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

    def ssl_context(self) -> ssl.SSLContext:
        """For a server that asks clients for no certificate. Raises OSError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context

    def expiry(self) -> datetime:
        """Of the first to expire in the chain. Raises OSError, and ValueError unless certificate and key are a pair."""
        chain = load_pem_x509_certificates(self.certificate.read_bytes())
        key = load_pem_private_key(self.key.read_bytes(), password=None)
        shown, own = (
            one.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) for one in (chain[0], key)
        )
        if shown != own:
            raise ValueError("the key is not that of the certificate")
        if self.authority is not None:
            load_pem_x509_certificates(self.authority.read_bytes())
        return min(one.not_valid_after_utc for one in chain)


class RenewedCertificate(Generic[T]):
    """What `make` makes of the files: made again once they change, and kept as it was while it cannot be made.

    `name` is the certificate's in log lines. Raises OSError where nothing can be made of the files at first.
    """

    def __init__(self, name: str, files: CertificateFiles, make: Callable[[CertificateFiles], T]) -> None:
        self._name = name
        self._files = files
        self._make = make
        self._lock = threading.Lock()
        self._state = files.state()
        self._value, self._expiry = self._made()

    def current(self) -> T:
        """Called at each handshake, in whichever thread."""
        with self._lock:
            state = self._files.state()
            if state != self._state:
                self._state = state
                self._renew()
            return self._value

    def expiry_timestamp(self) -> float:
        """When the certificate in use expires, in seconds since 1970."""
        self.current()
        return self._expiry.timestamp()

    def _renew(self) -> None:
        try:
            self._value, self._expiry = self._made()
        except OSError as error:
            logger.error(
                "%s has changed and cannot be used, so the one that expires at %s stays: %s",
                *(self._name, self._expiry.isoformat(), error),
            )
        else:
            logger.info("%s was read again, it expires at %s", self._name, self._expiry.isoformat())

    def _made(self) -> tuple[T, datetime]:
        try:
            return self._make(self._files), self._files.expiry()
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise CertificateError(f"{self._files.certificate}, {self._files.key}: {error}") from error


def grpc_credentials(
    certificate: RenewedCertificate[grpc.ServerCertificateConfiguration], *, mutual: bool
) -> grpc.ServerCredentials:
    """Credentials of a server that shows the certificate that is current at each handshake. `mutual`: it asks clients
    for theirs."""
    return grpc.dynamic_ssl_server_credentials(certificate.current(), certificate.current, mutual)


def https_context(certificate: RenewedCertificate[ssl.SSLContext]) -> ssl.SSLContext:
    """A context that gives each connection the certificate that is current at its handshake."""
    context = certificate.current()

    def choose(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, chosen: ssl.SSLContext) -> None:
        connection.context = certificate.current()

    # Called whether the client names a server or not.
    context.sni_callback = choose
    return context


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
