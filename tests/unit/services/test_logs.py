"""Log lines, and the request ids in them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from services.observability.logs import JsonFormatter, LogFormat, install_logs
from tests.support.logs import restored_loggers


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    with restored_loggers():
        yield


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.getLogger("services.test").makeRecord(
        "services.test", logging.WARNING, "file.py", 1, message, args, None, extra=extra
    )
    made.created = 1_700_000_000.25
    return made


def test_json_is_one_object_on_one_line() -> None:
    line = JsonFormatter().format(record("two\nlines of %s", "text", figures={"seconds": 0.5}, request_id="mine"))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "WARNING",
        "logger": "services.test",
        "message": "two\nlines of text",
        "request_id": "mine",
        "seconds": 0.5,
    }


@pytest.mark.parametrize("form", LogFormat)
def test_tracebacks_and_loggers_of_others(form: LogFormat) -> None:
    stream = io.StringIO()
    install_logs(form, logging.INFO, stream)
    try:
        raise ValueError("wrong")
    except ValueError:
        logging.getLogger("services.test").exception("it failed")
    logging.getLogger("services.test").debug("not told")
    logging.getLogger("elsewhere").error("not told")
    written = stream.getvalue()
    assert "ValueError: wrong" in written
    assert "not told" not in written
    if form is LogFormat.JSON:
        assert "ValueError: wrong" in json.loads(written)["exception"]
