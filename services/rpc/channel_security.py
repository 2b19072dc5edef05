"""Who may speak on the internal channels: mutual TLS, a shared token, or both."""

from __future__ import annotations

import ipaddress
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from spool.scheduler.errors import SpoolError
from spool.services.rpc.bearer import KEY_FORM, is_key
from spool.services.rpc.certificates import CertificateFiles, RenewedCertificate, grpc_credentials
from spool.services.rpc.channel_options import CHANNEL_OPTIONS, options_against_silence
from spool.services.rpc.listening import bind

TOKEN_METADATA_KEY = "authorization"

SECURITY_VARIABLE = "SPOOL_CHANNEL_SECURITY"
"""Environment variable by which a process gets its channel security, as JSON."""

_MIN_TOKEN_LENGTH = 16
_FILES = ("ca_file", "certificate_file", "key_file")


class InsecureListenError(SpoolError, ValueError):
    """A server without security is to listen where strangers can reach it."""


def random_token() -> str:
    """A new token that nobody can guess."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class ChannelSecurity:
    """How scheduler, workers and gateways prove to each other that they belong together.

    With `token` every call carries it and every server asks for it. With the three files (PEM) every channel is TLS,
    and both ends must show a certificate that the authority of `ca_file` signed. `server_name` is the name that all
    certificates carry, where they do not carry the addresses. Without either, servers listen on loopback only.

    Raises ValueError naming the field that is wrong.
    """

    token: str = field(default="", repr=False)
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    server_name: str = ""

    def __post_init__(self) -> None:
        if self.token:
            if len(self.token) < _MIN_TOKEN_LENGTH:
                raise ValueError(f"token has {len(self.token)} characters, must have at least {_MIN_TOKEN_LENGTH}")
            if not is_key(self.token):
                raise ValueError(f"token {KEY_FORM}")
        missing = [name for name in _FILES if not getattr(self, name)]
        if 0 < len(missing) < len(_FILES):
            raise ValueError(f"{', '.join(missing)} must be given too: mutual TLS takes {', '.join(_FILES)}")
        if self.server_name and missing:
            raise ValueError(f"server_name is {self.server_name!r}, and has no meaning without {', '.join(_FILES)}")

    @property
    def tls(self) -> bool:
        return bool(self.ca_file)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that every call carries."""
        return ((TOKEN_METADATA_KEY, f"Bearer {self.token}"),) if self.token else ()

    def open_channel(self, address: str, silence_seconds: float | None = None) -> grpc.aio.Channel:
        """A channel to a server. With `silence_seconds` the channel breaks once the server is silent for that long.

        Raises OSError if a file cannot be read.
        """
        options = self._channel_options(silence_seconds)
        credentials = self._channel_credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def open_blocking_channel(self, address: str, silence_seconds: float) -> grpc.Channel:
        """As `open_channel`, for a thread without an event loop."""
        options = self._channel_options(silence_seconds)
        credentials = self._channel_credentials()
        if credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, credentials, options=options)

    def listen(
        self,
        server: grpc.aio.Server,
        host: str,
        port: int,
        certificate: RenewedCertificate[grpc.ServerCertificateConfiguration] | None = None,
    ) -> str:
        """Binds the server to a port (0: a free one) and returns the address for others to connect to.

        With TLS it shows `certificate`, or else a `self.certificate()` of its own.

        Raises OSError if a file cannot be read or the port cannot be bound. Raises InsecureListenError for a host that
        stands for every interface, and without security for any host but loopback.
        """
        self._check_host(host)
        certificate = certificate or self.certificate()
        credentials = None if certificate is None else grpc_credentials(certificate, mutual=True)
        return bind(server, host, port, credentials)

    def certificate(self) -> RenewedCertificate[grpc.ServerCertificateConfiguration] | None:
        """The certificate that servers show, read again when it is renewed. Raises OSError if it cannot be read."""
        if not self.tls:
            return None
        files = CertificateFiles(Path(self.certificate_file), Path(self.key_file), Path(self.ca_file))
        return RenewedCertificate("the certificate of internal.tls", files, CertificateFiles.grpc_configuration)

    def to_json(self) -> str:
        """For handing the security to a child process. The text holds the token."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ChannelSecurity:
        """Reads what `to_json` wrote. Raises ValueError for any other text."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"channel security cannot be read: {error}") from error

    def _check_host(self, host: str) -> None:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            if host == "localhost":
                return
        else:
            if address.is_unspecified:
                raise InsecureListenError(f"host is {host}, must be one address of this node and not every interface")
            if address.is_loopback:
                return
        if not self.tls and not self.token:
            raise InsecureListenError(f"host is {host}, which is open to strangers: it takes a token or mutual TLS")

    def _read_files(self) -> Sequence[bytes]:
        return [Path(getattr(self, name)).read_bytes() for name in _FILES]

    def _channel_options(self, silence_seconds: float | None) -> list[tuple[str, Any]]:
        options: list[tuple[str, Any]] = [*CHANNEL_OPTIONS]
        if silence_seconds is not None:
            options = [*options_against_silence(silence_seconds)]
        if self.tls and self.server_name:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        return options

    def _channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Raises OSError if a file cannot be read."""
        if not self.tls:
            return None
        authority, certificate, key = self._read_files()
        return grpc.ssl_channel_credentials(authority, key, certificate)
