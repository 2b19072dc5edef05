"""Weights that come, that come no longer, and that never come."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from deploy.errors import RunError, UsageError
from deploy.kubernetes.fetching import Watch, fetch_watched
from tests.support.command_line import save_tokenizer, spool
from tests.support.tiny_models import save_tiny_pair
from tests.support.waiting import LONG


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def grow(file: Path, count: int) -> None:
    with file.open("ab") as content:
        content.write(b"\1" * count)


def test_what_comes_is_told_and_what_stops_is_found(tmp_path: Path) -> None:
    clock = Clock()
    (tmp_path / "blobs").mkdir()
    watch = Watch([tmp_path, tmp_path / "missing"], stall_seconds=60, clock=clock)
    for second in (10, 20):
        clock.now = second
        grow(tmp_path / "blobs" / "one", 10_000_000)
        line = watch.look()
        assert line == f"{second / 1000:.2f} GB are there, 1.0 MB/s"
    clock.now = 79
    assert watch.look() == "0.02 GB are there, 0.0 MB/s"
    clock.now = 80
    with pytest.raises(RunError, match=r"stuck: 0\.02 GB are there, and nothing has come for 60 s"):
        watch.look()
    grow(tmp_path / "blobs" / "one", 4096)
    assert watch.look().startswith("0.02 GB")


def test_a_file_made_in_full_length_is_not_there_yet(tmp_path: Path) -> None:
    clock = Clock()
    watch = Watch([tmp_path], stall_seconds=60, clock=clock)
    clock.now = 30
    with (tmp_path / "sparse").open("wb") as content:
        content.truncate(1 << 30)
    assert watch.look() == "0.00 GB are there, 0.0 MB/s"
    clock.now = 60
    with pytest.raises(RunError, match="stuck"):
        watch.look()


def test_a_fetch_that_hangs_ends(tmp_path: Path) -> None:
    hangs = threading.Event()
    told: list[str] = []
    watch = Watch([tmp_path], stall_seconds=0.2)
    try:
        with pytest.raises(RunError, match="stuck"):
            fetch_watched(["a", "b"], lambda name: name == "a" or hangs.wait(LONG), watch, told.append, 0.05)
    finally:
        hangs.set()
    assert told[0] == "a is ready"
    assert all(line.startswith("fetching b: 0.00 GB are there") for line in told[1:])


def test_why_a_fetch_fails_is_told(tmp_path: Path) -> None:
    def fetch(name: str) -> None:
        raise UsageError(f"the hub has no {name}")

    with pytest.raises(UsageError, match="the hub has no a"):
        fetch_watched(["a"], fetch, Watch([tmp_path], 60), lambda line: None)


def test_models_that_are_there_are_ready_at_once(tmp_path: Path) -> None:
    target, draft = save_tiny_pair("llama", tmp_path)
    for folder in (target, draft):
        save_tokenizer(folder)
    environment = {"SPOOL_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hub")}
    ended = spool("k8s", "fetch", "--stall-seconds", 300, "--", target, draft, environment=environment)
    assert ended.code == 0, ended.err
    assert f"{draft} is ready" in ended.err
    assert spool("k8s", "fetch", "--stall-seconds", 300, "--", environment=environment).code == 0
    ended = spool("k8s", "fetch", "--", tmp_path / "nothing", environment=environment)
    assert (ended.code, "nothing" in ended.err) == (2, True)
