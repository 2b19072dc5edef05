"""How clients reach Spool: addresses, authentication and limits of requests; and how replicas trust each other."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterator

from spool.deploy.config.placement import GatewayAutoscaling, Scaled
from spool.deploy.config.section import Secret, Section, described
from spool.scheduler.key_class import MAX_WEIGHT, MIN_WEIGHT, KeyClass
from spool.services.gateway.settings import NodeFile, RequestSettings, SamplingDefaults, TlsFiles, is_loopback
from spool.services.rpc.bearer import KEY_FORM, is_key

_SHORTEST_TOKEN = 16
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+")
_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DIGEST_OF_NOTHING = hashlib.sha256(b"").hexdigest()


class GatewaySettings(RequestSettings, Scaled):
    """The HTTP and gRPC ingress."""

    host: str = described("127.0.0.1", "Address to listen on; any address but loopback requires auth.", min_length=1)
    port: int = described(8000, "Port of the OpenAI HTTP API.", ge=1, le=65535)
    grpc_port: int | None = described(8001, "Port of the gRPC API; null: no gRPC.", ge=1, le=65535)
    autoscaling: GatewayAutoscaling | None = described(None, "Bounds within which replicas follow the open requests.")
    drain_seconds: float = described(30.0, "Time in which a departing replica ends its requests.", ge=1, le=86400)
    allow_unauthenticated: bool = described(False, "Allow listening beyond loopback without any API key.")
    sampling: SamplingDefaults | None = described(None, "Sampling defaults. Unset: the model's, else OpenAI's.")
    receipt_key_file: NodeFile | None = described(None, "Ed25519 private key (PEM) that signs them, on every node.")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.grpc_port == self.port:
            yield f"grpc_port is {self.grpc_port}, must differ from port"
        if not self.listens_on_loopback and not _is_address(self.host):
            yield f"host is {self.host!r}, must be localhost or an IP address"
        for number, name in enumerate(self.allowed_hosts):
            if not _HOST.fullmatch(name):
                yield f"allowed_hosts.{number} is {name!r}, must be a name in lower case, such as spool.example.com"
        for number, origin in enumerate(self.allowed_origins):
            if not _ORIGIN.fullmatch(origin):
                limit = "must be * or scheme, host and port alone, in lower case, such as https://example.com"
                yield f"allowed_origins.{number} is {origin!r}, {limit}"

    @property
    def leave_seconds(self) -> float:
        """On Ray, from the word that a gateway is to go: it waits for a successor first, half of the time at most."""
        return 1.5 * self.drain_seconds

    @property
    def listens_on_loopback(self) -> bool:
        return is_loopback(self.host)


class MutualTlsFiles(TlsFiles):
    """Our own certificate and key, and the authority that peers' certificates must come from."""

    ca: NodeFile = described(..., "Certificate of the authority that signs the certificates of all replicas.")
    server_name: str | None = described(None, "Name in all certificates that lack the nodes' addresses.", min_length=1)


class KeySettings(Section):
    """An API key with a name, and its part of the service."""

    name: str = described(..., "Name of the key in metrics and logs.", pattern=r"^[\w.-]{1,64}$")
    digest: str = described(..., "SHA-256 of the key, 64 hexadecimal digits; the key itself stands nowhere.")
    weight: float = described(1.0, "Competing keys get tokens in proportion to weights.", ge=MIN_WEIGHT, le=MAX_WEIGHT)
    max_running: int | None = described(None, "Sequences of the key that may run at a time. Unset: no own limit.", ge=1)
    max_waiting: int | None = described(None, "Sequences that may wait. Unset: scheduling.max_queued_sequences.", ge=1)
    tokens_per_minute: int | None = described(None, "Tokens of prompts and output; beyond, requests are refused.", ge=1)

    def problems(self) -> Iterator[str]:
        if not _DIGEST.fullmatch(self.digest):
            yield "digest is no SHA-256 in hexadecimal, must be 64 digits of 0-9 and a-f"
        if self.digest == _DIGEST_OF_NOTHING:
            yield "digest is that of no characters at all, must be a key's: the variable that was hashed was empty"

    @property
    def key_class(self) -> KeyClass:
        """For the scheduler core."""
        return KeyClass(self.name, self.weight, self.max_running, self.max_waiting, self.tokens_per_minute)


class AuthSettings(Section):
    """API keys of clients, and the certificate that they see."""

    keys: tuple[KeySettings, ...] = described((), "API keys with a name. Each other key has weight 1 and no limits.")
    api_keys: tuple[Secret, ...] = described((), "API keys without a name.")
    api_keys_env: str | None = described(
        None, "Environment variable of the gateway with more such keys, separated by commas.", min_length=1
    )
    api_keys_file: NodeFile | None = described(None, "File on the gateway's node with more such keys, one a line.")
    metrics_keys_env: str | None = described(
        None,
        "Environment variable of the gateway with keys, separated by commas, that may read /metrics and /load alone.",
        min_length=1,
    )
    metrics_keys_file: NodeFile | None = described(None, "File on the gateway's node with more such keys, one a line.")
    share_prefix_cache: bool = described(
        False,
        "Requests with different API keys reuse each other's KV of a common prompt prefix. Each key can then find out "
        "how prompts of the others begin.",
    )
    tls: TlsFiles | None = described(None, "Certificate for HTTP and gRPC; unset: no encryption.")

    def problems(self) -> Iterator[str]:
        for number, key in enumerate(self.api_keys):
            if not is_key(key.get_secret_value()):
                yield f"api_keys.{number} {KEY_FORM}"
        for field in ("metrics_keys_env", "metrics_keys_file"):
            if getattr(self, field) is not None and not self.required:
                yield f"{field} is set, must be unset where no other keys are: everybody may read metrics then"
        for field in ("name", "digest"):
            values = [getattr(key, field) for key in self.keys]
            for number, value in enumerate(values):
                first = values.index(value)
                if first < number:
                    yield f"keys.{number}.{field} is that of keys.{first}, must differ"

    @property
    def required(self) -> bool:
        return bool(self.keys or self.api_keys or self.api_keys_env or self.api_keys_file)


class InternalSettings(Section):
    """Between gateways, scheduler and workers: either a shared token or mutual TLS."""

    token: Secret | None = described(None, "Token of the replicas. Unset, and no TLS: each deployment makes one.")
    token_env: str | None = described(None, "Environment variable of all replicas with the token.", min_length=1)
    token_file: NodeFile | None = described(None, "File with the token, on every node.")
    tls: MutualTlsFiles | None = described(None, "Files for mutual TLS, on every node.")
    host: str | None = described(
        None,
        "Address that scheduler and workers listen on. Unset: the node's own; 127.0.0.1 on a Ray that `spool serve` "
        "started.",
        min_length=1,
    )

    def problems(self) -> Iterator[str]:
        given = [name for name in ("token", "token_env", "token_file") if getattr(self, name) is not None]
        for name in given[1:]:
            yield f"{name} is given together with {given[0]}, must be unset: one token is enough"
        token = self.token.get_secret_value() if self.token is not None else None
        if token is not None and len(token) < _SHORTEST_TOKEN:
            yield f"token has {len(token)} characters, must have at least {_SHORTEST_TOKEN}"
        if token is not None and not is_key(token):
            yield f"token {KEY_FORM}"

    @property
    def chosen(self) -> bool:
        """Whether the file says how replicas authenticate each other."""
        return any(value is not None for value in (self.token, self.token_env, self.token_file, self.tls))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
