"""gRPC options of both ends of the worker protocol."""

from __future__ import annotations

import math

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Else a ping that gRPC sent for its own sake would be waited for a minute, and keep-alive with it.
    ("grpc.http2.ping_timeout_ms", 10_000),
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnecting is the service's own business: gRPC's back-off would only add to it.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A worker's address names one process; a proxy of the environment has no place in between.
    ("grpc.enable_http_proxy", 0),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two workers on one port would share its connections.
    ("grpc.so_reuseport", 0),
]

# What gRPC's clients keep to, whatever they are told.
_SHORTEST_PING_INTERVAL_MS = 1_000

# Schedulers ping their workers that often, also in the middle of a long step.
WORKER_SERVER_OPTIONS: list[tuple[str, int]] = [
    *(dict(SERVER_OPTIONS) | {"grpc.http2.min_ping_interval_without_data_ms": _SHORTEST_PING_INTERVAL_MS // 2}).items()
]


def options_against_silence(seconds: float) -> list[tuple[str, int]]:
    """For a channel that breaks when the other process leaves a ping unanswered for so long; there is one a second.

    The answer comes from gRPC's own threads: neither a busy event loop nor a held GIL delays it.
    """
    timeout = math.ceil(seconds * 1000)
    pings = {
        "grpc.keepalive_time_ms": _SHORTEST_PING_INTERVAL_MS,
        "grpc.keepalive_timeout_ms": timeout,
        "grpc.http2.ping_timeout_ms": timeout,
    }
    return [*(dict(CHANNEL_OPTIONS) | pings).items()]
