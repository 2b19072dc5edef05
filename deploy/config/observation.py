"""Logs and traces of the replicas."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from enum import Enum
from urllib.parse import urlsplit

from spool.deploy.config.section import Section, described
from spool.services.observability.logs import LogFormat, install_logs


class LogLevel(Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def number(self) -> int:
        return int(logging.getLevelNamesMapping()[self.name])


class LoggingSettings(Section):
    """What replicas write to their standard error, which Ray keeps in its log folder."""

    format: LogFormat = described(LogFormat.TEXT, "`text`, or `json` for one object a line.")
    level: LogLevel = described(LogLevel.INFO, "The least important lines to write; `debug` has two for each sequence.")

    def install(self) -> None:
        """In this process, a replica."""
        install_logs(self.format, self.level.number)


class MetricsSettings(Section):
    """Where Prometheus finds what the scheduler counts. Gateways answer /metrics on their own port."""

    scheduler_address: str | None = described(
        "127.0.0.1:8002",
        "host:port of the scheduler's own /metrics, on the scheduler's node; no key is asked for. null: none.",
    )

    def problems(self) -> Iterator[str]:
        if self.scheduler_address is not None and self.listen() is None:
            yield (f"scheduler_address is {self.scheduler_address!r}, must be host:port, such as 127.0.0.1:8002")

    def listen(self, cell: int = 1) -> tuple[str, int] | None:
        """Host and port of the /metrics of a cell's scheduler; None where there is none."""
        host, _, port = (self.scheduler_address or "").rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        number = int(port) + cell - 1 if port.isascii() and port.isdigit() else 65536
        return (host, number) if host and number < 65536 else None


class TracingSettings(Section):
    """Spans of requests for OpenTelemetry, from gateways and scheduler."""

    endpoint: str | None = described(
        None,
        "URL of a collector for OTLP over HTTP, such as `http://collector:4318/v1/traces`, or `console` for standard "
        "error. Unset: no traces.",
        min_length=1,
    )
    sample_ratio: float = described(1.0, "Share of traced requests, of those whose client leaves it open.", ge=0, le=1)

    def problems(self) -> Iterator[str]:
        if self.endpoint is not None and self.endpoint != "console":
            if "@" in self.endpoint:
                # It would be printed with the rest of the URL.
                yield "endpoint holds a user or password, must not: OTEL_EXPORTER_OTLP_HEADERS is for these"
            elif not _is_http_url(self.endpoint):
                yield f"endpoint is {self.endpoint!r}, must be `console` or an http or https URL"


def _is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)
