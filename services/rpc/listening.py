"""Where gRPC servers listen."""

from __future__ import annotations

import grpc
import grpc.aio


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> str:
    """Binds the server to a port (0: a free one) and returns the address for clients.

    Raises OSError for a port that cannot be bound.
    """
    host_in_address = f"[{host}]" if ":" in host else host
    address = f"{host_in_address}:{port}"
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"host {host}, port {port}: cannot be bound: {error}") from error
    return f"{host_in_address}:{bound}"
