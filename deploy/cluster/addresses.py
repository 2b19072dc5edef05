"""Addresses that clients use, and whether they are free."""

from __future__ import annotations

import ipaddress
import json
import shlex
import socket
import ssl

from cryptography.x509 import load_pem_x509_certificates

from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.errors import UsageError

_ASK = "Name the capital of France."
_AUTHORITY = "YOUR-AUTHORITY.pem"
_LOOPBACK = "127.0.0.1"
_METRICS_TRIES = 100


def http_url(config: SpoolConfig) -> str:
    """Where the HTTP API is from this machine."""
    scheme = "https" if config.auth.tls is not None else "http"
    return f"{scheme}://{_reachable(config.gateway.host)}:{config.gateway.port}"


def grpc_address(config: SpoolConfig) -> str | None:
    """Where the gRPC API is from this machine."""
    if config.gateway.grpc_port is None:
        return None
    return f"{_reachable(config.gateway.host)}:{config.gateway.grpc_port}"


def metrics_urls(config: SpoolConfig, url: str) -> list[str]:
    """What Prometheus asks: the gateway at `url`, and the schedulers, one of each cell, where these are on this
    machine."""
    cells = range(1, config.groups.cells + 1 if config.ray.address is None else 1)
    listening = [listen for cell in cells if (listen := config.metrics.listen(cell)) is not None]
    return [f"{url}/metrics", *(f"http://{_reachable(host)}:{port}/metrics" for host, port in listening)]


def curl_line(config: SpoolConfig, url: str) -> str:
    """A command to try the server with."""
    question = [{"role": "user", "content": _ASK}]
    body = json.dumps({"model": config.served_name, "messages": question, "temperature": 0})
    key = " -H 'Authorization: Bearer YOUR-KEY'" if config.auth.required else ""
    file = authority_file(config)
    authority = "" if file is None else f" --cacert {shlex.quote(file)}"
    return f"curl{authority} {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"


def authority_file(config: SpoolConfig) -> str | None:
    """What clients on this machine must be given to trust the server: its certificate where that vouches for itself, a
    placeholder for the authority's where this machine does not know the authority; None where nothing is needed."""
    if config.auth.tls is None:
        return None
    file = config.auth.tls.certificate
    try:
        chain = load_pem_x509_certificates(file.read_bytes())
    except (OSError, ValueError):
        # On another node, which is where it is used.
        return _AUTHORITY
    if chain[0].issuer == chain[0].subject:
        return str(file)
    # A certificate holds its own name as the bytes that others have for their issuer's.
    issuer, known = chain[-1].issuer.public_bytes(), ssl.create_default_context().get_ca_certs(binary_form=True)
    return None if any(issuer in one for one in known) else _AUTHORITY


def check_ports(config: SpoolConfig) -> None:
    """Raises UsageError for a port of this machine that cannot be listened on."""
    gateway, metrics = config.gateway, config.metrics
    wanted = [
        (f"gateway.{field}", (gateway.host, port), f"--{field.replace('_', '-')} N")
        for field, port in (("port", gateway.port), ("grpc_port", gateway.grpc_port))
        if port is not None
    ]
    remedy = "--set metrics.scheduler_address=HOST:N, or null for none"
    addresses = [metrics.listen(cell) for cell in config.groups.cell_numbers]
    wanted += [("metrics.scheduler_address", address, remedy) for address in addresses if address is not None]
    for field, (host, port), remedy in wanted:
        try:
            _check_free(host, port)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(
                f"{field} is {port}, which is not available on {host}: {reason} (stop what listens there, or choose "
                f"another: {remedy})"
            ) from error


def with_metrics_port(config: SpoolConfig) -> SpoolConfig:
    """Unless the configuration says where, the scheduler's metrics get the first free port from the gateway's second
    neighbour on, so that applications on one machine have ports that differ, where those of their gateways do."""
    gateway, cells = config.gateway, config.groups.cells
    if "scheduler_address" in config.metrics.model_fields_set:
        return config
    for first in range(gateway.port + 2, min(gateway.port + 2 + _METRICS_TRIES, 65536 - cells)):
        ports = range(first, first + cells)
        if gateway.grpc_port not in ports and all(_is_free(_LOOPBACK, port) for port in ports):
            metrics = config.metrics.model_copy(update={"scheduler_address": f"{_LOOPBACK}:{first}"})
            return config.model_copy(update={"metrics": metrics})
    return config


def _is_free(host: str, port: int) -> bool:
    try:
        _check_free(host, port)
    except OSError:
        return False
    return True


def _check_free(host: str, port: int) -> None:
    """Raises OSError for a port that cannot be listened on."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(found[0], found[1], found[2]) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(found[4])


def _reachable(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "[::1]" if address.version == 6 else "127.0.0.1"
    return f"[{host}]" if address.version == 6 else host
