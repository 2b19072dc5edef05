"""What replicas say about what they do."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from enum import Enum
from urllib.parse import urlsplit

from deploy.configuration.section import FieldProblem, Section, described
from services.log_format import LogFormat


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


class TracingSettings(Section):
    """Spans of requests for OpenTelemetry, from gateways and scheduler."""

    endpoint: str | None = described(
        None,
        "URL of a collector for OTLP over HTTP, such as `http://collector:4318/v1/traces`, or `console` for standard "
        "error. Unset: no traces.",
        min_length=1,
    )
    sample_ratio: float = described(
        1.0, "Part of the requests that are traced, of those whose client does not say.", ge=0, le=1
    )
    service_name: str = described("spool", "Name under which the spans are found.", min_length=1)

    def problems(self) -> Iterator[FieldProblem]:
        if self.endpoint is not None and self.endpoint != "console":
            parts = urlsplit(self.endpoint)
            if parts.scheme not in ("http", "https") or not parts.netloc:
                yield FieldProblem(("endpoint",), f"is {self.endpoint!r}, must be `console` or an http or https URL")
