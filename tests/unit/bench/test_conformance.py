"""Schemas from files, and what is valid by them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from bench.structured.conformance import Asked, Report, UncheckedError, error_of, sampled, try_schema
from bench.structured.schemas import NamedSchema, read_schemas

SCHEMA = {"type": "array", "items": {"type": "integer"}}


def test_schemas_come_in_three_forms(tmp_path: Path) -> None:
    files = {
        "a/suite.json": [{"description": "lists", "schema": SCHEMA, "tests": []}, {"schema": True}],
        "b/bench.json": {"schema": SCHEMA, "tests": [], "meta": {}},
        "c/plain.json": SCHEMA,
        "c/never.json": False,
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    assert read_schemas(tmp_path) == [
        NamedSchema("a/suite/lists", SCHEMA),
        NamedSchema("a/suite/1", True),
        NamedSchema("b/bench", SCHEMA),
        NamedSchema("c/never", False),
        NamedSchema("c/plain", SCHEMA),
    ]


@pytest.mark.parametrize("text", ["[1", "17", '[{"description": "no schema"}]'])
def test_other_files_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"odd\.json (is not JSON|holds neither)"):
        read_schemas(tmp_path)


def test_what_is_valid() -> None:
    assert error_of(SCHEMA, "[1, 2]") is None
    assert error_of(SCHEMA, '[1, "2"]') == "'2' is not of type 'integer'"
    assert "no JSON" in (error_of(SCHEMA, "[1,") or "")
    assert error_of(False, "1") is not None
    for schema in ({"$ref": "http://localhost/other"}, {"pattern": r"^\cA$"}):
        with pytest.raises(UncheckedError):
            error_of(schema, '"a"')


def test_a_sample_stays_when_schemas_come_and_go() -> None:
    schemas = [NamedSchema(f"schema {number}", {}) for number in range(100)]
    sample = sampled(schemas, 10)
    assert len(sample) == 10
    assert sampled(schemas, None) == sampled(schemas, 100)
    assert sampled([one for one in schemas if one in sample or one.name.endswith("0")], 10) == sample


def reported(drafted: tuple[int, str, str], plain: tuple[int, str, str], schema: dict[str, object] = SCHEMA) -> Report:
    """Of a server that answers with these status codes, texts and finish reasons."""

    def answer(request: httpx.Request) -> httpx.Response:
        status, text, reason = drafted if json.loads(request.content)["spool"]["draft_length"] else plain
        choice = {"message": {"content": text}, "finish_reason": reason}
        usage = {"completion_tokens": 3, "spool": {"accepted": 1}}
        error = {"message": f"response_format cannot be used: {text}"}
        return httpx.Response(status, json={"choices": [choice], "usage": usage, "error": error})

    async def run() -> Report:
        report = Report()
        async with httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(answer)) as client:
            await try_schema(client, Asked("tiny", 5, 5.0, 1), {}, NamedSchema("one", schema), report)
        return report

    return asyncio.run(run())


def test_what_is_counted() -> None:
    good = (200, "[1]", "stop")
    assert reported(good, good) == Report(schemas=1, valid=1, valid_outputs=2, tokens=6, accepted=2)
    cut = (200, "[1,", "length")
    assert reported(cut, cut) == Report(schemas=1, cut=1, cut_outputs=2, tokens=6, accepted=2)
    refused = reported((400, "too long", ""), good)
    assert (refused.refused, refused.reasons, refused.valid, refused.good) == (1, {"too long": 1}, 0, True)
    unchecked = reported(good, good, {"$ref": "http://localhost/other"})
    assert [one["temperature"] for one in unchecked.unchecked] == [0.0, 0.8]
    assert (unchecked.valid, unchecked.valid_outputs, unchecked.good) == (0, 0, True)


def test_what_is_wrong() -> None:
    for drafted, plain, name in (
        ((200, "[1]", "stop"), (200, "[2]", "stop"), "differing"),
        ((200, "[1,", "length"), (200, "[1,", "stop"), "differing"),
        ((200, "1", "stop"), (200, "1", "stop"), "invalid"),
        ((200, "[1]", "stop"), (500, "", ""), "failed"),
    ):
        report = reported(drafted, plain)
        assert len(getattr(report, name)) == 2
        assert (report.valid, report.cut, report.good) == (0, 0, False)
