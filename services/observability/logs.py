"""Log lines: text for people or JSON for programs, each with the id of the request that the line belongs to, and the
name of its API key.

`extra` gives a record its `figures` (a mapping of numbers and short texts) and its `request_id`, as in
`logger.info("...", extra={"figures": {"seconds": 0.5}})`. A record without `request_id` gets that of the current task,
and every record gets the `key` of that task.

The formatters are ours: python-json-logger would still need a subclass as long as JsonFormatter for these field names,
times and figures, and structlog would change the lines of text and bring a second way to write a log.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import IO, Any

from services.observability.request_ids import current_key, current_request_id

PACKAGES = ("services", "scheduler", "engine", "deploy")
"""The packages of this project; their loggers are configured here."""


class LogFormat(Enum):
    TEXT = "text"
    JSON = "json"


class JsonFormatter(logging.Formatter):
    """One JSON object on each line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = _request_id(record)
        if request_id:
            line["request_id"] = request_id
        if current_key():
            line["key"] = current_key()
        # A figure never replaces one of the fields above.
        line = {**_figures(record), **line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, logger, request id in brackets, message, key and figures; a traceback follows on the next lines."""

    def format(self, record: logging.LogRecord) -> str:
        request_id = _request_id(record)
        parts = [_time(record), record.levelname, f"{record.name}:", *([f"[{request_id}]"] if request_id else [])]
        key = current_key()
        parts += [record.getMessage(), *([f"key={key}"] if key else [])]
        parts += [*(f"{name}={value}" for name, value in _figures(record).items())]
        text = " ".join(parts)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def install_logs(form: LogFormat, level: int, stream: IO[str] | None = None) -> logging.Handler:
    """Sends the lines of this project's loggers to `stream` (standard error unless given) and nowhere else."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
    return handler


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _request_id(record: logging.LogRecord) -> str:
    return str(getattr(record, "request_id", None) or current_request_id())


def _figures(record: logging.LogRecord) -> Mapping[str, Any]:
    figures: Mapping[str, Any] = getattr(record, "figures", {})
    return figures
