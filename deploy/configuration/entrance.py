"""Who may come in, where, and how much they may ask for."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from pydantic import SecretStr

from deploy.configuration.placement import GatewayAutoscaling, Placement
from deploy.configuration.section import FieldProblem, Section, described
from services.gateway.settings import Limits, SamplingDefaults

_SHORTEST_TOKEN = 16
_KEY = re.compile(r"[!-~]+")


class ProxyLocation(Enum):
    EVERY_NODE = "every_node"
    HEAD_NODE = "head_node"


class GatewaySettings(Placement):
    """The HTTP and gRPC entrance."""

    host: str = described("127.0.0.1", "Address to listen on; another than loopback asks for auth.", min_length=1)
    http_port: int = described(8000, "Port of the OpenAI HTTP API.", ge=1, le=65535)
    grpc_port: int | None = described(8001, "Port of the gRPC API; null: no gRPC.", ge=1, le=65535)
    http_on: ProxyLocation = described(
        ProxyLocation.EVERY_NODE, "Nodes that listen for HTTP: all those with replicas, or the head alone."
    )
    replicas: int = described(1, "Gateway replicas; with autoscaling, those at the start.", ge=1, le=4096)
    autoscaling: GatewayAutoscaling | None = described(
        None, "Bounds of a number of replicas that follows the open requests; unset: it does not change."
    )
    max_ongoing_requests: int = described(
        8192, "Open HTTP requests of one replica; more wait, with nobody to refuse them.", ge=1, le=1_000_000
    )
    drain_seconds: float = described(
        30.0, "Time that a replica that is to go has for ending its requests.", ge=1, le=86400
    )
    allow_unauthenticated: bool = described(False, "Listen beyond loopback although nobody has to show a key.")
    default_timeout_seconds: float | None = described(
        600.0, "Time for a request that names none; null: limits.timeout_seconds.", gt=0
    )
    retry_after_seconds: int = described(1, "What clients are told to wait when the queue is full.", ge=1, le=86400)
    sampling: SamplingDefaults | None = described(
        None, "What holds for requests that do not say. Unset: what the model's author recommends, else as OpenAI does."
    )
    limits: Limits = described(Limits(), "The most that one request may ask for.")

    def problems(self) -> Iterator[FieldProblem]:
        if self.grpc_port == self.http_port:
            yield FieldProblem(("grpc_port",), f"is {self.grpc_port}, must differ from http_port")
        if not self.listens_on_loopback and not _is_address(self.host):
            yield FieldProblem(("host",), f"is {self.host!r}, must be localhost or an IP address")
        scaling = self.autoscaling
        if scaling is not None and not scaling.min_replicas <= self.replicas <= scaling.max_replicas:
            limit = f"must be between autoscaling's {scaling.min_replicas} and {scaling.max_replicas}"
            yield FieldProblem(("replicas",), f"is {self.replicas}, {limit}")

    @property
    def listens_on_loopback(self) -> bool:
        return self.host == "localhost" or (_is_address(self.host) and ipaddress.ip_address(self.host).is_loopback)


class ServerTlsFiles(Section):
    """What we show, PEM files on every node."""

    certificate: Path = described(..., "Certificate, with those between it and its authority.")
    key: Path = described(..., "Its private key.")


class MutualTlsFiles(ServerTlsFiles):
    """What we show, and what our peers must show."""

    ca: Path = described(..., "Certificate of the authority that signs the certificates of all replicas.")
    server_name: str | None = described(
        None, "Name that all certificates carry, where they do not carry the nodes' addresses.", min_length=1
    )


class AuthSettings(Section):
    """What clients must show, and what we show them."""

    api_keys: tuple[SecretStr, ...] = described((), "Keys that clients may show.")
    api_keys_env: str | None = described(
        None, "Environment variable of the gateway with more keys, separated by commas.", min_length=1
    )
    api_keys_file: Path | None = described(None, "File on the gateway's node with more keys, one a line.")
    tls: ServerTlsFiles | None = described(None, "Certificate for HTTP and gRPC; unset: no encryption.")

    def problems(self) -> Iterator[FieldProblem]:
        for number, key in enumerate(self.api_keys):
            if not _KEY.fullmatch(key.get_secret_value()):
                yield FieldProblem(
                    ("api_keys", str(number)), "is a key with other characters than ASCII ones one can see"
                )

    @property
    def required(self) -> bool:
        return bool(self.api_keys or self.api_keys_env or self.api_keys_file)


class InternalSettings(Section):
    """Between gateways, scheduler and workers: either a shared token or mutual TLS."""

    token: SecretStr | None = described(
        None, "Token that every replica shows every other. Unset, and no TLS: a new one with each deployment."
    )
    token_env: str | None = described(None, "Environment variable of all replicas with the token.", min_length=1)
    token_file: Path | None = described(None, "File with the token, on every node.")
    tls: MutualTlsFiles | None = described(None, "Files for mutual TLS, on every node.")
    host: str | None = described(
        None,
        "Address that scheduler and workers listen on. Unset: the node's own; 127.0.0.1 on a Ray that `spool serve` "
        "started.",
        min_length=1,
    )

    def problems(self) -> Iterator[FieldProblem]:
        given = [name for name in ("token", "token_env", "token_file") if getattr(self, name) is not None]
        for name in given[1:]:
            yield FieldProblem((name,), f"is given beside {given[0]}, must be unset: one token is enough")
        token = self.token.get_secret_value() if self.token is not None else None
        if token is not None and len(token) < _SHORTEST_TOKEN:
            yield FieldProblem(("token",), f"has {len(token)} characters, must have at least {_SHORTEST_TOKEN}")
        if token is not None and not _KEY.fullmatch(token):
            yield FieldProblem(("token",), "has other characters than ASCII ones one can see")

    @property
    def chosen(self) -> bool:
        """Whether the file says how replicas know each other."""
        return any(value is not None for value in (self.token, self.token_env, self.token_file, self.tls))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
