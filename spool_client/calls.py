"""What the two clients share: how a channel is set up, and how a request is made repeatable."""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Sequence
from typing import Any

from spool.client.v1.generation_pb2 import GenerateRequest

_KEY = re.compile(r"[!-~]+")
_SCHEME = re.compile(r"(dns|ipv4|ipv6):")

# As the server draws them: readers of JSON keep such integers exact.
_SEED_BITS = 53

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    # Calls take turns where a name leads to several gateways. Else all would go to the first.
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    # A server that fell silent is noticed within half a minute, and the call made again.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # RetryPolicy says when to try again; gRPC's own pauses, of up to two minutes, would fail every attempt meanwhile.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Log probabilities of a long output are larger than gRPC's default of 4 MiB.
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
)


def check_key(api_key: str | None, address: str, *, encrypted: bool, insecure: bool) -> None:
    """Raises ValueError for a key that cannot be sent, or that others could read on its way."""
    if api_key is None:
        return
    if _KEY.fullmatch(api_key) is None:
        raise ValueError("api_key must be printable ASCII without spaces, at least one character; None: no key")
    if not encrypted and not insecure and not _on_this_machine(address):
        raise ValueError(
            f"api_key is given, and the connection to {address} is not encrypted: give credentials, such as "
            "grpc.ssl_channel_credentials(), or insecure=True where nobody else can read what is sent"
        )


def _on_this_machine(address: str) -> bool:
    """Of a target of gRPC, which may have a scheme and, where that is ipv4 or ipv6, several addresses."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    places = _SCHEME.sub("", address).rpartition("/")[2].split(",")
    return all(_is_loopback(place.rpartition(":")[0] or place) for place in places)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def metadata_for(api_key: str | None, settings: Sequence[tuple[str, Any]]) -> tuple[tuple[str, str], ...]:
    """With the largest message that a channel of these settings takes; -1 stands for any."""
    limit = dict(settings)["grpc.max_receive_message_length"]
    size = ("spool-max-message-bytes", str(limit if limit >= 0 else 2**31))
    return (size,) if api_key is None else (size, ("authorization", f"Bearer {api_key}"))


def repeatable(request: GenerateRequest) -> GenerateRequest:
    """The same request with a seed, so that every attempt gives the same output."""
    copy = GenerateRequest()
    copy.CopyFrom(request)
    if not copy.HasField("seed"):
        copy.seed = secrets.randbits(_SEED_BITS)
    return copy
