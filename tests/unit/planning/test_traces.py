"""Traces in the three public formats, by lines as their makers publish them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.errors import UsageError
from deploy.planning.traces import read_trace
from deploy.planning.traffic import PlannedRequest

MOONCAKE = """\
{"timestamp": 1500, "input_length": 700, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 600, "output_length": 3, "hash_ids": [0, 2]}
"""
AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
"""
BURST_GPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""


def trace(folder: Path, text: str, limit: int = 100) -> list[PlannedRequest]:
    file = folder / "trace"
    file.write_text(text, encoding="utf-8")
    return read_trace(file, limit)


def test_mooncake(tmp_path: Path) -> None:
    assert trace(tmp_path, MOONCAKE) == [
        PlannedRequest(0.0, 700, 500, (0, 1), 512),
        PlannedRequest(1.5, 600, 3, (0, 2), 512),
    ]


@pytest.mark.parametrize(
    ("text", "gap", "lengths"),
    [(AZURE_2023, 4.314579, [(374, 44), (396, 109)]), (AZURE_2024, 0.99007, [(2162, 5), (2399, 6)])],
)
def test_azure(tmp_path: Path, text: str, gap: float, lengths: list[tuple[int, int]]) -> None:
    first, second = trace(tmp_path, text)
    assert first.arrival == 0.0
    assert second.arrival == pytest.approx(gap, abs=2e-6)
    assert [(one.prompt_tokens, one.output_tokens) for one in (first, second)] == lengths


def test_burst_gpt_leaves_out_requests_that_got_no_answer(tmp_path: Path) -> None:
    assert trace(tmp_path, BURST_GPT) == [PlannedRequest(0.0, 472, 18), PlannedRequest(113.0, 417, 276)]


def test_only_so_many_are_read_and_they_are_sorted_by_arrival(tmp_path: Path) -> None:
    lines = [f'{{"timestamp": {time}, "input_length": 5, "output_length": 1}}' for time in (9000, 1000, 4000, 0)]
    assert [one.arrival for one in trace(tmp_path, "\n".join(lines), 3)] == [0.0, 3.0, 8.0]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no requests"),
        ("a,b\n1,2\n", "has the fields a, b; must have those of a Mooncake trace"),
        (
            '{"timestamp": 1, "input_length": 0, "output_length": 1}',
            ":1: the prompt has 0 tokens, must have at least 1",
        ),
        ('{"timestamp": 1, "input_length": 4}', ":1: has no field 'output_length'"),
        ('{"timestamp": 1, "input_length": 4, "output_length": 1}\n{', ":2: not JSON: Expecting"),
        (AZURE_2023 + "yesterday,1,1\n", ":4: Invalid isoformat string: 'yesterday'"),
        (BURST_GPT + "119,GPT-4,many,276,693,API log\n", ":5: invalid literal"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as raised:
        trace(tmp_path, text)
    assert complaint in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path / "none", 1)
