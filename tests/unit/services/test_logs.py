"""Log lines, and the request ids in them."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spool.services.observability.logs import JsonFormatter, LogFormat, install_logs
from tests.support.logs import restored_logger


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    with restored_logger():
        yield


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.getLogger("spool.services.test").makeRecord(
        "spool.services.test", logging.WARNING, "file.py", 1, message, args, None, extra=extra
    )
    made.created = 1_700_000_000.25
    return made


def test_json_is_one_object_on_one_line() -> None:
    line = JsonFormatter().format(record("two\nlines of %s", "text", figures={"seconds": 0.5}, request_id="mine"))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "WARNING",
        "logger": "spool.services.test",
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
        logging.getLogger("spool.services.test").exception("it failed")
    logging.getLogger("spool.services.test").debug("not told")
    logging.getLogger("elsewhere").error("not told")
    written = stream.getvalue()
    assert "ValueError: wrong" in written
    assert "not told" not in written
    if form is LogFormat.JSON:
        assert "ValueError: wrong" in json.loads(written)["exception"]


@pytest.mark.parametrize("form", LogFormat)
def test_text_of_clients_is_cut(form: LogFormat) -> None:
    stream, text = io.StringIO(), "y" * 10**6
    install_logs(form, logging.INFO, stream)
    try:
        raise ValueError(text + " at the end")
    except ValueError:
        logging.getLogger("spool.services.test").exception("%s", text, extra={"figures": {"text": text}})
    assert len(stream.getvalue()) < 30_000
    assert "(1000000 characters)" in stream.getvalue()
    assert "at the end" in stream.getvalue()


PROGRAM = """
import logging, os
from spool.services.observability.logs import LogFormat, install_logs
install_logs(LogFormat.TEXT, logging.INFO, file_bytes=10_000)
for number in range(1000):
    logging.getLogger("spool.services.test").info("line %d", number)
    os.write(2, b"of a library\\n")
"""


def test_a_log_file_has_so_many_bytes_and_as_many_are_kept_of_the_one_before(tmp_path: Path) -> None:
    path, before = tmp_path / "gateway.log", tmp_path / "gateway.log.1"
    path.write_text(heading := ":actor_name:ServeReplica:spool:Gateway\n")
    with path.open("ab") as log:
        subprocess.run([sys.executable, "-c", PROGRAM], stderr=log, check=True)
    assert {*tmp_path.iterdir()} == {path, before}
    kept = []
    for file in (before, path):
        text = file.read_text()
        assert len(text) < 10_200
        assert text.startswith(heading)
        kept += text.removeprefix(heading).splitlines()
    ours = [line for line in kept if line != "of a library"]
    numbers = [int(line.rpartition(" ")[2]) for line in ours]
    assert numbers == [*range(numbers[0], 1000)]
    assert abs(len(kept) - 2 * len(ours)) <= 1
