"""Addresses that clients use, and whether they are free."""

from __future__ import annotations

import ipaddress
import json
import socket

from deploy.config.spool_config import SpoolConfig
from deploy.errors import UsageError

_ASK = "Name the capital of France."


def http_url(config: SpoolConfig) -> str:
    """Where the HTTP API is from this machine."""
    scheme = "https" if config.auth.tls is not None else "http"
    return f"{scheme}://{_reachable(config.gateway.host)}:{config.gateway.port}"


def grpc_address(config: SpoolConfig) -> str | None:
    """Where the gRPC API is from this machine."""
    if config.gateway.grpc_port is None:
        return None
    return f"{_reachable(config.gateway.host)}:{config.gateway.grpc_port}"


def curl_line(config: SpoolConfig, url: str) -> str:
    """A command to try the server with."""
    question = [{"role": "user", "content": _ASK}]
    body = json.dumps({"model": config.served_name, "messages": question, "temperature": 0})
    key = " -H 'Authorization: Bearer YOUR-KEY'" if config.auth.required else ""
    return f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"


def check_ports(config: SpoolConfig) -> None:
    """Raises UsageError for a port of this machine that cannot be listened on."""
    gateway = config.gateway
    for field, port in (("port", gateway.port), ("grpc_port", gateway.grpc_port)):
        if port is None:
            continue
        try:
            found = socket.getaddrinfo(gateway.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            with socket.socket(found[0], found[1], found[2]) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(found[4])
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(
                f"gateway.{field} is {port}, which is not available on {gateway.host}: {reason} (stop what listens "
                f"there, or choose another: --{field.replace('_', '-')} N)"
            ) from error


def _reachable(host: str) -> str:
    if host == "localhost":
        return host
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return "[::1]" if address.version == 6 else "127.0.0.1"
    return f"[{host}]" if address.version == 6 else host
