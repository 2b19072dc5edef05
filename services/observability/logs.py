"""Log lines: text for people or JSON for programs, each with the id of the request that the line belongs to, the id of
its trace, and the name of its API key.

`extra` gives a record its `figures` (a mapping of numbers and short texts), its `request_id` and its `traceparent`, as
in `logger.info("...", extra={"figures": {"seconds": 0.5}})`. A record without the ids gets those of the current task,
and every record gets the `key` of that task.

The formatters are ours: python-json-logger would still need a subclass as long as JsonFormatter for these field names,
times and figures, and structlog would change the lines of text and bring a second way to write a log.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import IO, Any, TextIO

from spool.services.observability.request_ids import current_key, current_request_id, current_traceparent, trace_id_of

# Characters of a message, of a figure, and of the end of a traceback: some of the text may be a client's.
_MESSAGE, _FIGURE, _TRACEBACK = 4096, 256, 16384

LOGGER = "spool"
"""Above the loggers of all modules of this project; it is configured here."""

DEFAULT_FILE_BYTES = 16 * 1024 * 1024

_STDERR = 2
_HEADING_BYTES = 4096


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
            "message": shortened(record.getMessage(), _MESSAGE),
        }
        request_id = _request_id(record)
        if request_id:
            line["request_id"] = request_id
        if trace_id := _trace_id(record):
            line["trace_id"] = trace_id
        if current_key():
            line["key"] = current_key()
        # A figure never replaces one of the fields above.
        line = {**_figures(record), **line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-_TRACEBACK:]
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, logger, request id in brackets, message, key, trace and figures; a traceback follows on lines of its
    own."""

    def format(self, record: logging.LogRecord) -> str:
        request_id = _request_id(record)
        parts = [_time(record), record.levelname, f"{record.name}:", *([f"[{request_id}]"] if request_id else [])]
        key = current_key()
        parts += [shortened(record.getMessage(), _MESSAGE), *([f"key={key}"] if key else [])]
        parts += [f"trace_id={trace_id}"] if (trace_id := _trace_id(record)) else []
        parts += [*(f"{name}={value}" for name, value in _figures(record).items())]
        text = " ".join(parts)
        return f"{text}\n{self.formatException(record.exc_info)[-_TRACEBACK:]}" if record.exc_info else text


class _StandardError(logging.StreamHandler[TextIO]):
    """Standard error, of this process with all that libraries write there. Where that is a file, it becomes FILE.1 once
    it has more than so many bytes, and a new one takes its place."""

    def __init__(self, file_bytes: int) -> None:
        super().__init__(sys.stderr)
        self._file_bytes = file_bytes

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        with contextlib.suppress(OSError):
            written = os.fstat(_STDERR)
            if stat.S_ISREG(written.st_mode) and written.st_size > self._file_bytes:
                self._begin_file(stat.S_IMODE(written.st_mode))

    def _begin_file(self, mode: int) -> None:
        path = os.readlink(f"/proc/self/fd/{_STDERR}")
        with open(path, "rb") as file:
            # Ray writes there whose log it is.
            heading = [line for line in file.read(_HEADING_BYTES).splitlines(keepends=True) if line.startswith(b":")]
        os.replace(path, f"{path}.1")
        new = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
        os.writev(new, heading)
        os.dup2(new, _STDERR)
        os.close(new)


def install_logs(
    form: LogFormat, level: int, stream: IO[str] | None = None, file_bytes: int = DEFAULT_FILE_BYTES
) -> logging.Handler:
    """Sends the lines of this project's loggers to `stream` and nowhere else. Unless one is given, that is standard
    error; a file there has about `file_bytes` at most."""
    handler = logging.StreamHandler(stream) if stream is not None else _StandardError(file_bytes)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    logger = logging.getLogger(LOGGER)
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
    return handler


def shortened(text: str, most: int) -> str:
    """The first `most` characters, and how many there are; shorter texts as they are."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _request_id(record: logging.LogRecord) -> str:
    return str(getattr(record, "request_id", None) or current_request_id())


def _trace_id(record: logging.LogRecord) -> str:
    return trace_id_of(getattr(record, "traceparent", None) or current_traceparent())


def _figures(record: logging.LogRecord) -> Mapping[str, Any]:
    figures: Mapping[str, Any] = getattr(record, "figures", {})
    return {name: shortened(value, _FIGURE) if isinstance(value, str) else value for name, value in figures.items()}
