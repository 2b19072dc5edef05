"""gRPC options of the channels and servers between gateways, scheduler and workers."""

from __future__ import annotations

import math

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Else gRPC waits a minute for the answer to a ping of its own, and delays keep-alive pings meanwhile.
    ("grpc.http2.ping_timeout_ms", 10_000),
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The processes reconnect by their own schedule; gRPC's back-off would only add to the pauses.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # An address names one process: connect to that process, whatever proxy the environment names.
    ("grpc.enable_http_proxy", 0),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Else a second server could bind the port too, and connections would be spread over both.
    ("grpc.so_reuseport", 0),
]

# gRPC clients never ping more often than this, whatever their options say.
_MIN_PING_INTERVAL_MS = 1_000

# Schedulers ping their workers once in the minimum interval, also in the middle of a long step.
WORKER_SERVER_OPTIONS: list[tuple[str, int]] = [
    *(dict(SERVER_OPTIONS) | {"grpc.http2.min_ping_interval_without_data_ms": _MIN_PING_INTERVAL_MS // 2}).items()
]


def options_against_silence(seconds: float) -> list[tuple[str, int]]:
    """Options of a channel that pings once a second, and breaks when a ping is unanswered for `seconds`.

    gRPC's own threads answer pings, so neither a busy event loop nor a held GIL delays an answer.
    """
    timeout = math.ceil(seconds * 1000)
    pings = {
        "grpc.keepalive_time_ms": _MIN_PING_INTERVAL_MS,
        "grpc.keepalive_timeout_ms": timeout,
        "grpc.http2.ping_timeout_ms": timeout,
    }
    return [*(dict(CHANNEL_OPTIONS) | pings).items()]
