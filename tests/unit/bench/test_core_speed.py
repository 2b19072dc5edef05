"""The benchmark of the scheduler core counts what the core decides; its times are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.core_speed import Load, measure


@pytest.mark.parametrize("policy", ["ragged", "exspec", "eqspec"])
def test_counts_add_up(policy: str) -> None:
    speed = measure(Load(pool=60, window=24, batch_size=4, rows=2000, policy=policy))
    assert speed.rows == speed.target_rows + speed.draft_rows
    assert 2000 <= speed.rows < 2000 + 2 * 64
    assert speed.draft_rows > 0
    assert speed.rounds <= speed.target_rows
    assert speed.commands["EmitTokens"] == speed.rounds
    assert speed.rounds < speed.emitted_tokens <= 5 * speed.rounds
    assert speed.pool == speed.window + speed.waiting == 60
    assert speed.window <= 24
    assert speed.finished == speed.commands["FinishSequence"] > 0
    assert 0 < speed.handle_seconds_p50 <= speed.handle_seconds_p99 <= speed.handle_seconds_max


def test_plain_decoding_has_no_draft_rows() -> None:
    speed = measure(Load(pool=20, window=10, batch_size=4, rows=500, draft_length=0))
    assert speed.draft_rows == 0
    assert speed.emitted_tokens == speed.rounds


def test_json_stands_on_the_last_line() -> None:
    command = [sys.executable, "-m", "bench.core_speed", "--pool", "20", "--window", "10", "--rows", "500", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["load"]["pool"] == result["pool"] == 20
    assert result["rows"] >= 500
